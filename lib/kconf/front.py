"""Command line behind the make targets. All policy is in the modules that it calls."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.errors import run_main
from lib.kconf import edit, listing
from lib.kconf.defconfig import DIRECTORY
from lib.kconf.extremes import KINDS
from lib.kconf.foreign import judge
from lib.kconf.lock import locked
from lib.kconf.project import Project, tell
from lib.kconf.reader import foremost
from lib.kconf.tree import display, load_tree
from lib.kconf.variables import check_variables, given_overrides, stray_variables

COMMANDS = {**edit.OF_CONFIGURATION, **edit.OF_SHIPPED, **listing.COMMANDS}
_SIMPLE = {
    "menuconfig": "edit the configuration in a terminal",
    "nconfig": "the same",
    "guiconfig": "edit the configuration in a window",
    "xconfig": "the same",
    "config": "ask for every option",
    "oldconfig": "ask for the options that the configuration does not mention",
    "olddefconfig": "bring the configuration up to date with the Kconfig files",
    "syncconfig": "olddefconfig, and include/config/auto.conf",
    "listnewconfig": "options that the configuration does not mention",
    "helpnewconfig": "the same, with their help",
    "update-defconfigs": "write every shipped configuration in its minimal form",
    "list-defconfigs": "shipped configurations and fragments",
    "kconfig-docs": "write docs/options.md",
    "kconfig-lint": "check Kconfig files, configurations and fragments against the rules of the house",
    "check-variables": "check the variables of make's command line",
}
# Commands that apply CONFIG_ variables of the command line, as a run does.
_OF_RUNS = {"checkconfig", "explain", "searchconfig"}
# Commands that last until the user ends them: always, or if stdin is a terminal.
_WINDOWS = {"guiconfig", "xconfig"}
_DIALOGUES = {"menuconfig", "nconfig", "config", "oldconfig"}


def main(arguments: Sequence[str], *, root: Path) -> int:
    """Run one command for the tree at `root`; returns 0, or 2 after one-line errors on stderr."""
    options = _parser().parse_args(arguments)
    return run_main(lambda: _run(options, root))


def _run(options: argparse.Namespace, root: Path) -> int:
    if options.command == "check":
        return _check(options)
    check_variables(root, os.environ)
    tell(stray_variables(root, os.environ))
    if options.command == "check-variables":
        return 0
    if options.command not in _OF_RUNS and (names := " ".join(given_overrides(os.environ))):
        tell([f"{names} on the command line is for runs; it is not written"])
    project = Project.of_environment(root)
    with _lock(project, options.command):
        COMMANDS[options.command](project, options)
    return 0


def _lock(project: Project, command: str) -> contextlib.AbstractContextManager[None]:
    if command in edit.OF_CONFIGURATION:
        interactive = command in _WINDOWS or (command in _DIALOGUES and sys.stdin.isatty())
        return locked(project.config_file, command, interactive=interactive)
    if command in edit.OF_SHIPPED:
        return locked(project.root / DIRECTORY, command)
    return contextlib.nullcontext()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kconf.py", description="Configuration of training runs", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _SIMPLE.items():
        commands.add_parser(name, help=text)
    for name in KINDS:
        commands.add_parser(name, help="a whole configuration by rule")
    named = commands.add_parser("defconfig", help="start from a shipped configuration, or from all defaults")
    named.add_argument("name", nargs="?", help="NAME or NAME+FRAGMENT+...")
    merged = commands.add_parser("merge", help="put fragments on top of the configuration")
    merged.add_argument("names", nargs="*", help="names of fragments")
    for command in (named, merged):
        command.add_argument("--fragments", default="", metavar="FILES", help="files of fragments, in order")
        command.add_argument(
            "--strict", action="store_true", help="what replaces an earlier value is an error"
        )
    minimal = commands.add_parser("savedefconfig", help="write the minimal form")
    minimal.add_argument("file", nargs="?", type=Path)
    minimal.add_argument("--name", help="write the shipped configuration of this name")
    checked = commands.add_parser("checkconfig", help="check the configuration, or FILE")
    checked.add_argument("file", nargs="?", type=Path)
    setting = commands.add_parser("setconfig", help="set options in the configuration")
    setting.add_argument("assignments", nargs="?", default="", metavar="NAME=VALUE ...")
    compared = commands.add_parser("diffconfig", help="compare files, shipped configurations or runs")
    compared.add_argument("-a", default="", help="the older; the configuration before the last change")
    compared.add_argument("-b", default="", help="the newer; the configuration")
    explained = commands.add_parser("explain", help="all about one option")
    explained.add_argument("symbol", nargs="?", default="")
    searched = commands.add_parser("searchconfig", help="find options")
    searched.add_argument("words", nargs="?", default="")
    _add_check(commands.add_parser("check", help="check files against any Kconfig tree"))
    return parser


def _add_check(foreign: argparse.ArgumentParser) -> None:
    foreign.add_argument("--kconfig", default="Kconfig", help="top Kconfig file")
    foreign.add_argument("--srctree", type=Path, default=Path(), help="where the tree starts")
    foreign.add_argument("--prefix", help="what stands before symbol names (default: $CONFIG_, or CONFIG_)")
    foreign.add_argument("files", nargs="+", type=Path, metavar="FILE")


def _check(options: argparse.Namespace) -> int:
    """Print lost assignments to stdout, one per line. With V=1 also those whose value holds anyway."""
    verbose = "1" in (os.environ.get("V"), os.environ.get("KCONFIG_VERBOSE"))
    tree = load_tree(options.kconfig, srctree=options.srctree, prefix=options.prefix, inside=True)
    lost = agreeing = 0
    for path in options.files:
        losses, others = judge(tree, path)
        lost, agreeing = lost + len(losses), agreeing + len(others)
        lines = [*map(str, losses)]
        for line in lines if verbose else foremost(lines, f"faults in {display(path)}"):
            print(line)
        for finding in others if verbose else ():
            tell([f"{finding} (it is so anyway)"])
    if agreeing:
        seen = "" if verbose else " (V=1 shows them)"
        counts = f"lines that are lost or wrong: {lost}; others of which the value is so anyway: {agreeing}"
        tell([f"{counts}{seen}"])
    return 2 if lost else 0
