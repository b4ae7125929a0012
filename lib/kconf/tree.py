"""Loading of a Kconfig tree, and queries on its symbols."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kconfiglib

from lib.errors import ConfigError
from lib.plugin_folders import EXTERNAL, external

# Files that the tree includes; a new one of a plug-in belongs to it.
_PLUGINS = ("models/*/Kconfig", "train/tasks/*/Kconfig", "lib/data/datasets/*/Kconfig")
_FILES = ("Kconfig", "lib/*/Kconfig", "train/Kconfig", *_PLUGINS)
_parsed: dict[tuple[Path, Path | None], tuple[Any, Any]] = {}
_LOOP_ITEM = re.compile(r"(<choice[^>]*>|\S+) \(defined at ([^),]+)")


def load_tree(
    kconfig: str | Path = "Kconfig",
    *,
    srctree: Path,
    prefix: str | None = None,
    kind: type[Any] = kconfiglib.Kconfig,
    inside: bool = False,
) -> Any:
    """Parse a Kconfig tree into a `kconfiglib.Kconfig`, with all warnings kept in its `warnings`.

    kconfig: top file, as an absolute path or relative to `srctree` (or else to the current directory).
    prefix:  prefix of symbol names in configuration files; None = the variable CONFIG_, or "CONFIG_".
    kind:    class to create, `kconfiglib.Kconfig` or derived from it.
    inside:  make `srctree` the current directory, so that $(shell ...) of a foreign tree finds its files.
    Raises ConfigError, in one line, for any fault of the Kconfig files.
    """
    top, root = Path(kconfig), srctree.absolute()
    if top.is_absolute() or not (srctree / top).exists():
        top = top.absolute()
        top = top.relative_to(root) if top.is_relative_to(root) else top
    srctree = root if inside else srctree
    with _environment(srctree=str(srctree), CONFIG_=prefix):
        try:
            with contextlib.chdir(srctree) if inside else contextlib.nullcontext():
                tree = kind(str(top), warn_to_stderr=False)
        except kconfiglib.KconfigError as error:
            raise ConfigError(_one_line(str(error))) from error
        except OSError as error:
            # kconfiglib's subclass has a message with file and line; a plain OSError has a file name.
            text = str(error) if hasattr(error, "msg") else f"{error.filename}: {error.strerror}"
            raise ConfigError(" ".join(text.split())) from error
        except RecursionError as error:
            raise ConfigError(f"{kconfig}: an expression is nested too deeply") from error
    return tree


def load_own_tree(root: Path, *, kind: type[Any] = kconfiglib.Kconfig) -> Any:
    """Parse `root`/Kconfig with that of EXTERNAL=, without other variables of the environment.

    Raises ConfigError for warnings, too.
    """
    if (base := external()) is not None:
        from lib.kconf.external import check, guarded, refuse_changes  # most have no such folder

        check(base, root)
        kind = guarded(kind)
    tree = load_tree("Kconfig", srctree=root, prefix="CONFIG_", kind=_finding(kind, base))
    if base is not None:
        refuse_changes(tree, base)
    if tree.warnings:
        findings = [" ".join(text.removeprefix("warning: ").split()) for text in tree.warnings]
        raise ConfigError("the Kconfig files have faults", findings=findings)
    tree.warn = False  # lib.kconf.strict checks assignments, with reasons
    return tree


def _finding(kind: type[Any], base: Path | None) -> type[Any]:
    """Return the class `kind` of trees with the folder `base` of EXTERNAL= as $(ANNEAL_EXTERNAL)."""
    folder = glob.escape(str(base)) if base else "Kconfig/none"  # a path below a file cannot exist

    class Tree(kind):  # type: ignore[misc]
        def _fn_val(self, arguments: list[str]) -> Any:
            return folder if arguments == [EXTERNAL] else super()._fn_val(arguments)

    return Tree


@contextlib.contextmanager
def parsed_tree(root: Path) -> Iterator[Any]:
    """Yield what `load_own_tree` returns, for the block only: parsed again only where files have changed.

    The symbols may have values of an earlier block. `StrictLoad` discards them.
    """
    root = root.absolute()
    key = root, external()
    # Other threads that load meanwhile find none, and parse one of their own.
    stamps, tree = _parsed.pop(key, (None, None))
    now = _stamps(*key)  # before parsing: a file that is edited meanwhile must not be believed
    if tree is None or now != stamps:
        tree, stamps = load_own_tree(root), now
    yield tree
    if all(root / name in stamps for name in tree.kconfig_filenames):
        _parsed[key] = stamps, tree


def _stamps(root: Path, base: Path | None = None) -> dict[Path, tuple[int, ...]]:
    """Return what changes with each file that the tree at `root`, with EXTERNAL= `base`, is parsed from."""
    files = [file for pattern in _FILES for file in root.glob(pattern)]
    if base is not None:
        from lib.kconf.external import FILES

        files += [file for pattern in FILES for file in base.glob(pattern)]
    facts = {file: file.stat() for file in files if file.is_file()}
    return {file: (fact.st_mtime_ns, fact.st_size, fact.st_ino) for file, fact in facts.items()}


def option(symbol: Any) -> str:
    """Return the symbol's name with prefix, as in configuration files: CONFIG_SEED."""
    return f"{symbol.kconfig.config_prefix}{symbol.name}"


def find(tree: Any, name: str) -> Any | None:
    """Return the symbol that is defined under `name` (without prefix), or None."""
    symbol = tree.syms.get(name)
    return symbol if symbol is not None and symbol.nodes else None


def has_prompt(item: Any) -> bool:
    """True if a symbol or choice has a prompt, so that a user can set it."""
    return any(node.prompt for node in item.nodes)


def prompt_of(item: Any) -> str:
    """Return the prompt of a symbol or choice; "" without one."""
    return next((str(node.prompt[0]) for node in item.nodes if node.prompt), "")


def menu_of(node: Any) -> Any:
    """Return the node of the menu that contains a menu entry."""
    menu = node.parent
    while menu.item is not kconfiglib.MENU or not menu.prompt:
        menu = menu.parent
    return menu


def is_logical(symbol: Any) -> bool:
    """True if the symbol is a bool or a tristate."""
    return symbol.orig_type in (kconfiglib.BOOL, kconfiglib.TRISTATE)


def shown(symbol: Any, value: str) -> str:
    """Format `CONFIG_NAME=value` as in a configuration file."""
    if symbol.orig_type == kconfiglib.STRING:
        return f'{option(symbol)}="{kconfiglib.escape(value)}"'
    return f"{option(symbol)}={value}"


def active_range(symbol: Any) -> tuple[int, int, Any] | None:
    """Return the active bounds (inclusive) and the condition as written; None = no range."""
    base = 16 if symbol.orig_type == kconfiglib.HEX else 10
    # Entries have a fourth element in some versions of kconfiglib.
    for (low, high, condition, *_), written in zip(symbol.ranges, symbol.orig_ranges, strict=True):
        if kconfiglib.expr_value(condition):
            return _bound(low, base), _bound(high, base), written[2]
    return None


def display(path: Path) -> str:
    """Return the name of a file for messages: relative to the current directory if below it."""
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - a symbolic link keeps its own name
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _bound(symbol: Any, base: int) -> int:
    try:
        return int(symbol.str_value, base)
    except ValueError:
        return 0  # as kconfiglib and the C tools read an empty bound


@contextlib.contextmanager
def _environment(**variables: str | None) -> Iterator[None]:
    """Set environment variables, which configure kconfiglib, for the block; None leaves one unchanged."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    before = {name: value for name, value in os.environ.items() if name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _one_line(text: str) -> str:
    """Reduce kconfiglib's multi-line errors on loops and undecodable files to place and reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines[0] == "Dependency loop":
        items = _LOOP_ITEM.findall(text)
        chain = " -> ".join(name for name, _ in items)
        return f"{items[0][1]}: dependency loop: {chain}"
    if lines[0].startswith("Malformed"):
        place = lines[0].split(" in ", 1)[1].strip("'")
        return f"{place}: not UTF-8 ({lines[-1].removeprefix('Reason: ')})"
    return lines[0].removeprefix("error: ").replace(": error: ", ": ", 1)
