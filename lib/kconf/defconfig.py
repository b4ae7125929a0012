"""Shipped configurations: defconfigs/NAME, and fragments merged on top of one (NAME+FRAGMENT+...).

A fragment (NAME or NAME.config) is searched in the directories of ANNEAL_CONFIG_PATH, separated by colons,
and then in defconfigs/fragments. A folder of EXTERNAL= has its own defconfigs/, which add to these.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import ConfigError
from lib.kconf.diagnostics import close_names
from lib.kconf.reader import Layer
from lib.kconf.resolve import accept, read_own
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import display
from lib.plugin_folders import external
from lib.units import setting

DIRECTORY = "defconfigs"
FRAGMENTS = "defconfigs/fragments"
PATH_VARIABLE = "ANNEAL_CONFIG_PATH"

_HOW_TO_ADD = "write CONFIGURATION+FRAGMENT, as in make defconfig-lenet5+debug"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def compose(
    tree: Any, spec: str, *, more: Sequence[Path] = (), strict: bool = False
) -> tuple[StrictLoad, list[str]]:
    """Load the configuration `NAME` or `NAME+FRAGMENT+...` into our own `tree`; also returns its notices.

    NAME may also be the path of a file, with a slash.

    more: files to merge on top, in order. strict: a fragment that overrides an earlier value is an error, not
    a notice. Raises ConfigError.
    """
    root = Path(tree.srctree)
    base, *fragments = parts_of(spec)
    if fragments and not all((base, *fragments)):
        raise ConfigError(f"'{spec}' lacks a name beside a plus sign", todo=_HOW_TO_ADD)
    found = [find_fragment(root, name) for name in fragments]
    paths = [_pick(base, *available(root), "configuration"), *found, *more]
    layers = [read_shipped(root, path) for path in paths]
    configuration = StrictLoad(tree, *layers, refuse_replacing=strict)
    notices = hidden(root, found)
    return configuration, [*notices, *accept(configuration, "no configuration was written").notices]


def parts_of(spec: str) -> list[str]:
    """Return the name, or the path, of the configuration in `spec`, and the names of the fragments."""
    return [spec] if is_file(spec) else spec.split("+")


def available(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of configurations by name, and of fragments in search order. Raises ConfigError."""
    named = [Path(name) for name in os.environ.get(PATH_VARIABLE, "").split(":") if name]
    for path in named:
        if not path.is_dir():
            raise ConfigError(f"{PATH_VARIABLE} names {path}, which is not a directory")
    roots = [root, *([base] if (base := external()) else [])]
    fragments = [path for place in (*named, *(one / FRAGMENTS for one in roots)) for path in _files(place)]
    configurations = {path.name: path for path in _files(root / DIRECTORY)}
    for path in _files(roots[-1] / DIRECTORY):
        if configurations.setdefault(path.name, path) != path:
            both = f"{display(configurations[path.name])} and {display(path)}"
            raise ConfigError(f"{both} are both called {path.name}", todo="rename the second")
    return list(configurations.values()), fragments


def path_of(root: Path, name: str) -> Path:
    """Return the path of the configuration `name`; a new one belongs to EXTERNAL=, where it is given.

    Raises ConfigError for invalid names.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name}' cannot be the name of a configuration", todo="use FILE= for a path")
    for path in _files(root / FRAGMENTS):
        if _is_called(path, name):
            raise ConfigError(f"{display(path)} is a fragment of that name", todo="choose another DEFCONFIG=")
    path, base = root / DIRECTORY / name, external()
    return path if base is None or path.is_file() else base / DIRECTORY / name


def find_fragment(root: Path, name: str) -> Path:
    """Return the file of the fragment `name`. Raises ConfigError where there is none."""
    configurations, fragments = available(root)
    return _pick(name, fragments, configurations, "fragment")


def hidden(root: Path, found: Sequence[Path]) -> list[str]:
    """Return a notice for each fragment that is shadowed by one of the same name in `found`."""
    _, fragments = available(root)
    return [
        f"{display(path)} is used, and {display(other)} of the same name is not"
        for path in found
        for other in fragments
        if other != path and other.name.removesuffix(".config") == path.name.removesuffix(".config")
    ]


def read_shipped(root: Path, path: Path) -> Layer:
    """Read a shipped file as a layer, recorded in the configuration made from it if it lies below `root`."""
    layer = read_own(root, path)
    absolute, base = path.absolute(), root.absolute()
    # A path outside is a fact of this machine. In the header line commas separate the names.
    name = str(absolute.relative_to(base)) if absolute.is_relative_to(base) else ""
    return dataclasses.replace(
        layer, sources=(name,) if name and name.isprintable() and "," not in name else ()
    )


def summary(path: Path) -> str:
    """Return the comment in the first line of a configuration, or ""."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    return first.lstrip("# ") if _is_comment(first) else ""


def opening_comment(path: Path) -> str:
    """Return the leading comment lines of a configuration, which are kept when it is rewritten.

    Raises ConfigError where there are comments further down, which the minimal form cannot keep.
    """
    if not path.is_file():
        return ""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    count = next((index for index, line in enumerate(lines) if not _is_comment(line)), len(lines))
    for number, line in enumerate(lines[count:], count + 1):
        if _is_comment(line):
            raise ConfigError(
                f"{display(path)}:{number}: a comment below the first assignment would be lost",
                todo="move it to the top of the file",
            )
    return "".join(f"{line}\n" for line in lines[:count])


def _is_comment(line: str) -> bool:
    return line.startswith("#") and not line.endswith(" is not set")


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_file() and _NAME.fullmatch(path.name))


def is_file(name: str) -> bool:
    """True for the path of a file; a shipped configuration is named without a slash."""
    return "/" in name and Path(name).is_file()


def _is_called(path: Path, name: str) -> bool:
    return path.name in (name, f"{name}.config")


def _pick(name: str, wanted: list[Path], others: list[Path], kind: str) -> Path:
    for path in wanted:
        if _is_called(path, name):
            return path
    if is_file(name) and kind == "configuration":
        return Path(name)
    if is_file(name):
        raise ConfigError(
            f"{name} is a path, not the name of a {kind}", todo=f"give {setting('FRAGMENT', name)}"
        )
    if any(path.name == name for path in others):
        other = "fragment" if kind == "configuration" else "configuration"
        raise ConfigError(f"{name} is a {other}, not a {kind}", todo=_HOW_TO_ADD)
    close = close_names(name, [path.name for path in wanted])
    hint = f"did you mean {' or '.join(close)}?" if close else "make list-defconfigs shows what there is"
    output = os.environ.get("KCONFIG_OUTPUT", ".")
    if not close and output != "." and external() is None:
        hint += f"; EXTERNAL=DIR is kept for each O=, and none for O={output}"
    raise ConfigError(f"there is no {kind} called '{name}'", todo=hint)
