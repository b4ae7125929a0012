"""Interactive menu: kconfiglib's, with strict loading, saving and checking."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kconfiglib

from lib.errors import ConfigError
from lib.kconf import diagnostics, spelling, write
from lib.kconf.lock import locked
from lib.kconf.resolve import load_file, load_text, load_valid_lines, new_symbols, read_own
from lib.kconf.tree import display, load_own_tree
from lib.kconf.values import rule_of

NO_KEY = -1  # curses' result without input; a signal may cause one
MAX_SILENT_READS = 100


def run_menu(root: Path, config_file: Path, *, command: str) -> None:
    """Edit `config_file` in a terminal. For a file with faults, ask whether to continue without them.

    command: name for errors. Raises ConfigError without a terminal, or where the answer is no.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        target = "setconfig" if config_file.exists() else "defconfig-NAME"
        raise ConfigError(f"{command} needs a terminal", todo=f"use make {target}")
    import curses  # imported here: not every Python has it

    import menuconfig

    try:
        curses.setupterm()
        usable = curses.tigetstr("cup") is not None  # it can move the cursor
    except curses.error:
        usable = False
    if not usable:
        name = os.environ.get("TERM", "")
        raise ConfigError(f"{command} cannot use the terminal TERM='{name}'", todo="set TERM, say to xterm")
    tree = load_own_tree(root, kind=_MenuTree)
    tree.edit(config_file)
    _patch(menuconfig, tree, _checker(menuconfig._error))
    menuconfig._getch_compat = _keys(menuconfig._getch_compat, command)
    try:
        with tree.locks:
            menuconfig.menuconfig(tree)
    except curses.error as error:
        raise ConfigError(f"{command} cannot draw on this terminal", why=str(error)) from error


def _patch(program: Any, tree: _MenuTree, check: Callable[..., bool]) -> None:
    """Let kconfiglib's menuconfig or guiconfig check, describe and save values as `tree` does.

    They have no public hooks for these; tests/lib/kconf/test_menu.py checks that the names exist.
    """
    program._check_valid = check
    program._range_info = _value_info(program._range_info)
    program._needs_save = tree.needs_save
    program._node_str = _entry(program._node_str, tree, page=False)
    program._info_str = _entry(program._info_str, tree, page=True)
    os.environ["KCONFIG_CONFIG"] = str(tree.file)  # they read the file name from it


def _entry(describe: Callable[[Any], str], tree: _MenuTree, *, page: bool) -> Callable[[Any], str]:
    """Wrap the text of a menu entry, or its page of information, to say why an entry is hidden.

    Only what a loaded file does not mention is (NEW).
    """

    def text(node: Any) -> str:
        shown = describe(node)
        if not isinstance(node.item, kconfiglib.Symbol | kconfiglib.Choice):
            return shown
        why = diagnostics.why_hidden(node.item)
        if page:  # the window cuts long lines
            lines = re.sub(r"; | (?=and )", "\n        ", why)
            return f"Hidden: {lines}\n{shown}" if why else shown
        shown = shown if node.item in tree.new else shown.replace(" (NEW)", "", 1)
        return f"{shown} (hidden: {why})" if why else shown

    return text


def _keys(read: Callable[[Any], Any], command: str) -> Callable[[Any], Any]:
    """Wrap `read` to raise ConfigError when the terminal is gone; the menu would poll forever."""

    def key(window: Any) -> Any:
        for _ in range(MAX_SILENT_READS):
            pressed = read(window)
            if pressed != NO_KEY:
                return pressed
        raise ConfigError(f"the terminal of {command} is gone", why="nothing was saved since the last time")

    return key


def run_window(root: Path, config_file: Path, *, command: str) -> None:
    """Edit `config_file` in a window, as `run_menu` does. Raises ConfigError without a display or tkinter."""
    try:
        import tkinter

        import guiconfig
    except ImportError as error:
        todo = "install it (Debian: python3-tk), or use make menuconfig"
        raise ConfigError(f"{command} needs tkinter", why=str(error), todo=todo) from error

    def show_error(text: str, dialog: Any, entry: Any) -> None:
        guiconfig.messagebox.showerror("Bad value", text, parent=dialog)
        entry.focus_set()

    try:
        tkinter.Tk().destroy()  # checks the display before asking on the terminal
        tree = load_own_tree(root, kind=_MenuTree)
        tree.edit(config_file)
        _patch(guiconfig, tree, _checker(show_error))
        with tree.locks:
            guiconfig.menuconfig(tree)
    except tkinter.TclError as error:
        raise ConfigError(f"{command} has no display", why=str(error), todo="use make menuconfig") from error


class _MenuTree(kconfiglib.Kconfig):  # type: ignore[misc]
    """Kconfig tree for the menu, with strict load and save methods."""

    locks: contextlib.ExitStack  # of files loaded in addition to the edited one, whose lock the command holds
    file: Path
    new: frozenset[Any]  # options that the loaded file does not mention
    _locked: set[str]
    _notices: list[str]
    _sources: tuple[str, ...]

    def edit(self, config_file: Path) -> None:
        """Load `config_file`, if it exists. Raises ConfigError where it has a fault and the user declines."""
        self.file = config_file
        self.locks, self._locked = contextlib.ExitStack(), {os.path.realpath(config_file)}
        self._notices, self._sources, self.new = [], (), frozenset()
        if not config_file.exists():
            return
        try:
            configuration, self._notices = load_file(self, config_file)
        except ConfigError as error:
            if not read_own(Path(self.srctree), config_file).assignments:
                raise  # no line of it is valid
            _ask_to_drop(error)
            configuration = load_valid_lines(self, config_file)
        self._sources = configuration.sources
        self.new = frozenset(new_symbols(self, read_own(Path(self.srctree), config_file)))

    def load_config(self, filename: str | None = None) -> str:
        """Load a file for the menu: at the start (without a name) and from its load dialog."""
        if filename is None:
            return "\n".join(self._notices) or f"Editing {display(self.file)}"
        before = write.full_text(self)
        try:
            self._lock(Path(filename))
            configuration, _ = load_file(self, Path(filename))
        except ConfigError as error:
            load_text(self, before)
            # The dialog shows the text of an OSError, which needs an errno.
            raise OSError(errno.EINVAL, "\n".join([*error.findings[:8], str(error)])) from error
        self.file = Path(filename)
        self._sources = configuration.sources
        self.new = frozenset(new_symbols(self, read_own(Path(self.srctree), self.file)))
        return f"Loaded {filename}"

    def _lock(self, path: Path) -> None:
        """Lock a file that will be saved to. Raises ConfigError where another command holds it."""
        if (name := os.path.realpath(path)) not in self._locked and path.exists():
            self.locks.enter_context(locked(path, "menuconfig", interactive=True))
            self._locked.add(name)

    def write_config(self, filename: str) -> str:
        """Save to the file of the menu's save dialog. Raises OSError, which the menu shows."""
        changed = write.write_configuration(Path(filename), self._text(), keep_old=True)
        self.file = Path(filename)
        return f"{'Saved' if changed else 'No change to'} {display(self.file)}"

    def write_min_config(self, filename: str) -> str:
        """Save the minimal form, as `write_config` does."""
        changed = write.write_configuration(Path(filename), write.minimal_text(self))
        return f"{'Saved' if changed else 'No change to'} {display(Path(filename))}"

    def needs_save(self) -> bool:
        """True if saving would change the file."""
        return not self.file.is_file() or self.file.read_bytes() != self._text().encode()

    def _text(self) -> str:
        return write.full_text(self, sources=self._sources)


def _ask_to_drop(error: ConfigError) -> None:
    """Ask whether to continue without the faulty lines. Raises `error` where the answer is not yes."""
    for finding in error.findings:
        print(finding, file=sys.stderr)
    print("These lines would be dropped. Edit the rest? [y/N] ", end="", flush=True)
    if not sys.stdin.isatty() or sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError(error.what, why=error.why, todo=error.todo) from error


def _checker(show_error: Callable[..., None]) -> Callable[..., bool]:
    """Return the check of a value typed into a dialog of the menu, or of the window with its entry."""

    def check(*arguments: Any) -> bool:
        *of_window, symbol, value = arguments
        if fault := spelling.fault_of(symbol, value):
            show_error(fault, *of_window)
        return fault is None

    return check


def _value_info(range_info: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """Return the dialog's hint for a value: the range, or the `Value:` line."""

    def info(symbol: Any) -> str | None:
        rule = rule_of(symbol) if symbol.orig_type == kconfiglib.STRING else None
        return f"Value: {rule.text}" if rule else range_info(symbol)

    return info
