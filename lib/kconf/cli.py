"""Command line behind the make targets. All policy is in the modules that it calls."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import run_main
from lib.kconf import edit, listing
from lib.kconf.defconfig import DIRECTORY, available
from lib.kconf.lock import locked
from lib.kconf.project import Project, check_variables, given_overrides, report_notices, stray_variables
from lib.kconf.tree import load_own_tree
from lib.plugin_folders import EXTERNAL

COMMANDS = {**edit.OF_CONFIGURATION, **edit.OF_SHIPPED, **listing.COMMANDS}
# Commands that apply CONFIG_ variables of the command line, as a run does.
_OF_RUNS = {"checkconfig", "explain", "searchconfig"}
# Commands on the tree alone, without a folder of EXTERNAL=.
_OF_THE_TREE = {"kconfig-docs", "kconfig-lint", "update-defconfigs"}
# Commands that last until the user ends them: always, or if stdin is a terminal.
_WINDOWS = {"guiconfig", "xconfig"}
_DIALOGUES = {"menuconfig", "nconfig", "config", "oldconfig"}

Argument = tuple[str, dict[str, Any]]
_FRAGMENTS: list[Argument] = [
    ("--fragments", {"default": "", "metavar": "FILES", "help": "files of fragments, in order"}),
    ("--strict", {"action": "store_true", "help": "what replaces an earlier value is an error"}),
]
_FILE: Argument = ("file", {"nargs": "?", "type": Path})
_ARGUMENTS: dict[str, list[Argument]] = {
    "defconfig": [("name", {"nargs": "?", "help": "NAME or NAME+FRAGMENT+..."}), *_FRAGMENTS],
    "merge": [("names", {"nargs": "*", "help": "names of fragments"}), *_FRAGMENTS],
    "savedefconfig": [_FILE, ("--name", {"help": "write the shipped configuration of this name"})],
    "checkconfig": [_FILE],
    "setconfig": [("assignments", {"nargs": "?", "default": "", "metavar": "NAME=VALUE ..."})],
    "diffconfig": [
        ("-a", {"default": "", "help": "the older; the configuration before the last change"}),
        ("-b", {"default": "", "help": "the newer; the configuration"}),
    ],
    "explain": [("symbol", {"nargs": "?", "default": ""})],
    "searchconfig": [("words", {"nargs": "?", "default": ""})],
    "check": [
        ("--kconfig", {"default": "Kconfig", "help": "top Kconfig file"}),
        ("--srctree", {"type": Path, "default": Path(), "help": "root of the tree"}),
        ("--prefix", {"help": "prefix of symbol names (default: $CONFIG_, or CONFIG_)"}),
        ("files", {"nargs": "+", "type": Path, "metavar": "FILE"}),
    ],
}


def main(arguments: Sequence[str], *, root: Path) -> int:
    """Run one command for the tree at `root`; returns 0, or 2 after one-line errors on stderr."""
    # What the commands write, they write before they print.
    return run_main(lambda: _run(_parser().parse_args(arguments), root), is_listing=True)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kconf.py", description="Configuration of training runs", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {name: text for name, (_, text) in COMMANDS.items()}
    helps["external"] = "keep EXTERNAL= for later commands, or forget it"
    helps["check-variables"] = "check the variables of make's command line"
    helps["check"] = "check files against any Kconfig tree"
    for name, text in helps.items():
        command = commands.add_parser(name, help=text)
        for argument, settings in _ARGUMENTS.get(name, ()):
            command.add_argument(argument, **settings)
    return parser


def _run(options: argparse.Namespace, root: Path) -> int:
    if options.command == "check":
        return listing.check_files(options)
    if options.command in _OF_THE_TREE:
        os.environ.pop(EXTERNAL, None)
    check_variables(root)
    report_notices(stray_variables(root))
    if options.command == "check-variables":
        return 0
    if options.command == "external":
        from lib.kconf.external import keep

        load_own_tree(root)
        available(root)
        report_notices([keep(Project.of_environment(root).output)])
        return 0
    if options.command not in _OF_RUNS and (names := " ".join(given_overrides(os.environ))):
        report_notices([f"{names} on the command line is for runs; it is not written"])
    project = Project.of_environment(root)
    with _lock(project, options.command):
        run, _ = COMMANDS[options.command]
        run(project, options)
    return 0


def _lock(project: Project, command: str) -> contextlib.AbstractContextManager[None]:
    if command in edit.OF_CONFIGURATION:
        interactive = command in _WINDOWS or (command in _DIALOGUES and sys.stdin.isatty())
        return locked(project.config_file, command, interactive=interactive)
    if command in edit.OF_SHIPPED:
        return locked(project.root / DIRECTORY, command)
    return contextlib.nullcontext()
