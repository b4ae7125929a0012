"""The interactive menu: kconfiglib's, with loading, saving and checking replaced by the strict ones."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import kconfiglib

from lib.errors import ConfigError
from lib.kconf import spelling, write
from lib.kconf.resolve import load_file, load_text
from lib.kconf.tree import display, load_own_tree
from lib.kconf.values import rule_of


def run_menu(root: Path, config_file: Path) -> None:
    """Edit `config_file` in a terminal. Raises ConfigError without one, or where the file has a fault."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "menuconfig needs a terminal", todo="use make defconfig-NAME, or edit the file by hand"
        )
    import curses  # only here: not every Python has it

    import menuconfig

    if not _can_move_its_cursor(curses):
        name = os.environ.get("TERM", "")
        raise ConfigError(f"menuconfig cannot use the terminal TERM='{name}'", todo="set TERM, say to xterm")
    tree = load_own_tree(root, kind=_MenuTree)
    tree.edit(config_file)
    # What the menu offers no other way to replace; tests/unit/test_kconf_menu.py holds these names.
    menuconfig._check_valid = _checker(menuconfig._error)
    menuconfig._range_info = _value_info(menuconfig._range_info)
    menuconfig._needs_save = tree.needs_save
    os.environ["KCONFIG_CONFIG"] = str(config_file)  # where the menu reads its file name
    try:
        menuconfig.menuconfig(tree)
    except curses.error as error:
        raise ConfigError("menuconfig cannot draw on this terminal", why=str(error)) from error


def _can_move_its_cursor(curses: ModuleType) -> bool:
    try:
        curses.setupterm()
    except curses.error:
        return False
    return curses.tigetstr("cup") is not None


class _MenuTree(kconfiglib.Kconfig):  # type: ignore[misc]
    """A tree for the menu to edit: its load and save methods are the strict ones."""

    _file: Path
    _notices: list[str]

    def edit(self, config_file: Path) -> None:
        """Start with the content of `config_file`, if it exists. Raises ConfigError where it has a fault."""
        self._file = config_file
        self._notices = load_file(self, config_file)[1] if config_file.exists() else []

    def load_config(self, filename: str | None = None) -> str:
        """Called by the menu at the start (without a name) and by its load dialog."""
        if filename is None:
            return "\n".join(self._notices) or f"Editing {display(self._file)}"
        before = write.full_text(self)
        try:
            load_file(self, Path(filename))
        except ConfigError as error:
            load_text(self, before)
            # The dialog shows the text of an OSError, and wants a number with it.
            raise OSError(errno.EINVAL, "\n".join([*error.findings[:8], str(error)])) from error
        self._file = Path(filename)
        return f"Loaded {filename}"

    def write_config(self, filename: str) -> str:
        """Called by the menu with the name from its save dialog. Raises OSError, which the menu shows."""
        changed = write.write_atomically(Path(filename), write.full_text(self), keep_old=True)
        self._file = Path(filename)
        return f"{'Saved' if changed else 'No change to'} {display(self._file)}"

    def write_min_config(self, filename: str) -> str:
        """As `write_config`, for the minimal form."""
        changed = write.write_atomically(Path(filename), write.minimal_text(self))
        return f"{'Saved' if changed else 'No change to'} {display(Path(filename))}"

    def needs_save(self) -> bool:
        """Whether saving would change the file."""
        return not self._file.is_file() or self._file.read_bytes() != write.full_text(self).encode()


def _checker(show_error: Callable[[str], None]) -> Callable[[Any, str], bool]:
    """The check of a value typed into the menu's dialog."""

    def check(symbol: Any, value: str) -> bool:
        try:
            spelling.check_spelling(symbol, value)
        except spelling.Misspelled as error:
            show_error(str(error))
            return False
        is_number = symbol.orig_type in (kconfiglib.INT, kconfiglib.HEX)
        fault = spelling.range_fault(symbol, value) if is_number else None
        if fault:
            show_error(fault)
        return fault is None

    return check


def _value_info(range_info: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """What the dialog shows beside the field: the range, or the `Value:` line."""

    def info(symbol: Any) -> str | None:
        rule = rule_of(symbol) if symbol.orig_type == kconfiglib.STRING else None
        return f"Value: {rule.text}" if rule else range_info(symbol)

    return info
