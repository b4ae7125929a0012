"""Differences between two configurations: files, shipped configurations, run directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.errors import ConfigError
from lib.kconf import defconfig, write
from lib.kconf.reader import Layer, read_text
from lib.kconf.resolve import accept, read_own, rejection
from lib.kconf.strict import StrictLoad
from lib.kconf.tree import find, load_own_tree

RUN_CONFIG = "config"  # file name of the configuration in a run directory


def differences(root: Path, old: str, new: str) -> Iterator[str]:
    """Yield lines `-NAME value`, `+NAME value` and ` NAME value -> value`, in the order of the menu.

    old, new: a file, a run directory, or the name of a shipped configuration, also with fragments. Choice
    members are omitted, since the string of the choice names them. Raises ConfigError.
    """
    tree = load_own_tree(root)
    before, after = _values(tree, old), _values(tree, new)
    order = {symbol.name: index for index, symbol in enumerate(tree.unique_defined_syms)}
    for name in sorted(before.keys() | after.keys(), key=lambda one: (order.get(one, len(order)), one)):
        symbol = find(tree, name)
        one, other = before.get(name), after.get(name)
        if one == other or (symbol is not None and symbol.choice):
            continue
        if other is None:
            yield f"-{name} {one}"
        elif one is None:
            yield f"+{name} {other}"
        else:
            yield f" {name} {one} -> {other}"


def _values(tree: Any, place: str) -> dict[str, str]:
    """Return symbol -> right-hand side for every value in the full configuration of `place`."""
    path = Path(place)
    if path.is_dir():
        path = path / RUN_CONFIG
    if path.is_file():
        layer = read_own(Path(tree.srctree), path)
        if layer.faults:
            raise rejection(layer.faults, "nothing was compared")
        configuration = StrictLoad(tree)
        configuration.add(layer)
        # A full file is compared as it is, even if the Kconfig files have changed since.
        if configuration.is_by_tool(layer):
            return _pairs(layer)
        accept(configuration, "nothing was compared")
    elif "/" in place or place.startswith("."):
        raise ConfigError(f"{place} is neither a configuration nor the directory of a run")
    else:
        defconfig.compose(tree, place)
    text = write.full_text(tree)
    return _pairs(read_text(text.encode(), name=place))


def _pairs(layer: Layer) -> dict[str, str]:
    return {assignment.name: assignment.text for assignment in layer.assignments}
