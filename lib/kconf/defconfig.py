"""Shipped configurations: defconfigs/NAME, and fragments put on top of one (NAME+FRAGMENT+...)."""

from __future__ import annotations

import re
from pathlib import Path

from lib.errors import ConfigError
from lib.kconf.reader import read_file
from lib.kconf.resolve import accept
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import load_own_tree

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def compose(root: Path, spec: str) -> tuple[StrictLoad, list[str]]:
    """The configuration `NAME` or `NAME+FRAGMENT+...` and its notices. Raises ConfigError."""
    paths = _paths(root, spec)
    configuration = StrictLoad(load_own_tree(root))
    for path in paths:
        configuration.add(read_file(path))
    verdict = accept(configuration, "nothing was written")
    return configuration, list(verdict.notices)


def available(root: Path) -> tuple[list[Path], list[Path]]:
    """The files of configurations and of fragments, sorted by name."""
    directory = root / "defconfigs"
    return _files(directory), _files(directory / "fragments")


def summary(path: Path) -> str:
    """The comment in the first line of a configuration, or nothing."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    return first.lstrip("# ") if first.startswith("#") and not first.endswith(" is not set") else ""


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.is_file() and _NAME.fullmatch(path.name))


def _paths(root: Path, spec: str) -> list[Path]:
    bases, fragments = available(root)
    base, *others = spec.split("+")
    return [_pick(base, bases, fragments, "configuration")] + [
        _pick(name, fragments, bases, "fragment") for name in others
    ]


def _pick(name: str, wanted: list[Path], others: list[Path], kind: str) -> Path:
    for path in wanted:
        if path.name == name:
            return path
    if any(path.name == name for path in others):
        other = "fragment" if kind == "configuration" else "configuration"
        raise ConfigError(
            f"{name} is a {other}, not a {kind}",
            todo="write CONFIGURATION+FRAGMENT, as in make defconfig-lenet5+debug",
        )
    import difflib  # only when something is wrong: the import is slow

    close = difflib.get_close_matches(name, [path.name for path in wanted], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else "make list-defconfigs shows what there is"
    raise ConfigError(f"there is no {kind} called '{name}'", todo=hint)
