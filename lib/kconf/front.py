"""The configuration commands behind the make targets. All policy is in the modules that they call."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from lib.errors import ConfigError, run_main
from lib.kconf import defconfig, variables, write
from lib.kconf.reader import read_file
from lib.kconf.resolve import Resolved, accept, load, load_file
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display, load_own_tree, load_tree


def main(arguments: Sequence[str], *, root: Path) -> int:
    """Run one command for the tree at `root`; the exit status: 0, or 2 with one-line errors on stderr."""
    options = _parser().parse_args(arguments)
    return run_main(lambda: _run(options, root))


def from_environment(root: Path) -> Resolved:
    """The configuration that make asks for: KCONFIG_CONFIG (or `root`/.config) and the CONFIG_ variables of
    make's command line. Notices go to stderr. Raises ConfigError."""
    variables.check_variables(root, os.environ)
    overrides = variables.given_overrides(os.environ)
    resolved = load(root=root, config_file=variables.config_file_of(root, os.environ), overrides=overrides)
    for name in variables.stray_variables(root, os.environ):
        print(f"note: {name} in the environment is not used; give it on make's command line", file=sys.stderr)
    _say(resolved.notices)
    return resolved


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kconf.py", description="Configuration of training runs", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("menuconfig", help="edit the configuration in a terminal")
    named = commands.add_parser("defconfig", help="start from a shipped configuration")
    named.add_argument("name", help="NAME or NAME+FRAGMENT+...")
    commands.add_parser("olddefconfig", help="bring the configuration up to date with the Kconfig files")
    minimal = commands.add_parser("savedefconfig", help="write the minimal form")
    minimal.add_argument("file", nargs="?", type=Path, default=Path("defconfig"))
    commands.add_parser("list-defconfigs", help="shipped configurations and fragments")
    checked = commands.add_parser("checkconfig", help="check the configuration, or FILE")
    checked.add_argument("file", nargs="?", type=Path)
    commands.add_parser("check-variables", help="check the variables of make's command line")
    foreign = commands.add_parser("check", help="check files against any Kconfig tree")
    foreign.add_argument("--kconfig", default="Kconfig", help="top Kconfig file")
    foreign.add_argument("--srctree", type=Path, default=Path(), help="where the tree starts")
    foreign.add_argument("--prefix", help="what stands before symbol names (default: $CONFIG_, or CONFIG_)")
    foreign.add_argument("files", nargs="+", type=Path, metavar="FILE")
    return parser


def _run(options: argparse.Namespace, root: Path) -> int:
    if options.command == "check":
        return _check(options)
    variables.check_variables(root, os.environ)
    config_file = variables.config_file_of(root, os.environ)
    if options.command in ("defconfig", "olddefconfig", "savedefconfig", "menuconfig"):
        names = " ".join(variables.given_overrides(os.environ))
        _say([f"{names} on the command line is for runs; it is not written"] if names else [])
    if options.command == "menuconfig":
        from lib.kconf.menu import run_menu  # the only command that needs it

        run_menu(root, config_file)
    elif options.command == "defconfig":
        _defconfig(root, options.name, config_file)
    elif options.command == "olddefconfig":
        _olddefconfig(root, config_file)
    elif options.command == "savedefconfig":
        _savedefconfig(root, config_file, options.file)
    elif options.command == "list-defconfigs":
        _list_defconfigs(root)
    elif options.command == "checkconfig":
        _checkconfig(root, options.file)
    return 0


def _defconfig(root: Path, name: str, config_file: Path) -> None:
    configuration, notices = defconfig.compose(root, name)
    _say(notices)
    changed = _write(config_file, write.full_text(configuration.tree), keep_old=True)
    print(f"{display(config_file)}: {'written from' if changed else 'already as'} defconfigs/{name}")


def _olddefconfig(root: Path, config_file: Path) -> None:
    configuration, notices = load_file(load_own_tree(root), config_file, refresh=True)
    _say(notices)
    changed = _write(config_file, write.full_text(configuration.tree), keep_old=True)
    print(f"{display(config_file)}: {'brought up to date' if changed else 'is up to date'}")


def _savedefconfig(root: Path, config_file: Path, target: Path) -> None:
    configuration, notices = load_file(load_own_tree(root), config_file)
    _say(notices)
    # A shipped configuration starts with a comment that says what it is for; that stays.
    comment = (
        "" if not target.is_file() or not defconfig.summary(target) else f"# {defconfig.summary(target)}\n"
    )
    changed = _write(target, comment + write.minimal_text(configuration.tree))
    print(f"{display(target)}: {'written' if changed else 'unchanged'}")


def _list_defconfigs(root: Path) -> None:
    bases, fragments = defconfig.available(root)
    width = max((len(path.name) for path in bases + fragments), default=0)
    for title, paths in (
        ("Configurations (make defconfig-NAME)", bases),
        ("Fragments (make defconfig-NAME+FRAGMENT)", fragments),
    ):
        if paths:
            print(f"{title}:")
        for path in paths:
            print(f"  {path.name:<{width}}  {defconfig.summary(path)}".rstrip())


def _checkconfig(root: Path, file: Path | None) -> None:
    if file is None:
        from_environment(root)
        file = variables.config_file_of(root, os.environ)
    else:
        configuration = StrictLoad(load_own_tree(root))
        configuration.add(read_file(file))
        accept(configuration, "see above")
    print(f"{display(file)}: ok")


def _check(options: argparse.Namespace) -> int:
    """Findings are this command's output: one line each on stdout."""
    tree = load_tree(options.kconfig, srctree=options.srctree, prefix=options.prefix)
    count = 0
    for path in options.files:
        configuration = StrictLoad(tree)
        configuration.add(read_file(path, prefix=tree.config_prefix))
        findings = configuration.finish().findings
        count += len(findings)
        for finding in findings:
            print(finding)
    return 2 if count else 0


def _write(path: Path, text: str, *, keep_old: bool = False) -> bool:
    try:
        return write.write_atomically(path, text, keep_old=keep_old)
    except OSError as error:
        culprit = display(Path(error.filename)) if error.filename else display(path)
        raise ConfigError(f"cannot write {display(path)}", why=f"{culprit}: {error.strerror}") from error


def _say(notices: Iterable[str]) -> None:
    for notice in notices:
        print(f"note: {notice}", file=sys.stderr)
