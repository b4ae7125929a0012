"""An experiment file: a configuration to start from, what is changed, and what is tried out.

    defaults: [_self_, other]      # files it is laid upon, or that are laid upon it (after _self_)
    about: one sentence
    config: trm-sudoku4+fp32       # a shipped configuration, or alldefconfig: all defaults
    set: {MAX_STEPS: 200}          # symbols without CONFIG_
    sweep: grid                    # or zip, or random; or optuna, of which space.py tells more
    axes: {EMA: [true, false]}
    seeds: 3                       # how many, from 1 on, or a list
    samples: 20                    # of a random sweep, drawn by draw_seed

Mappings are merged key by key, lists and values replaced; null takes a symbol out of what was set.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from lib.errors import ConfigError
from lib.sweeps.search_space import Search, is_whole, search_of
from lib.sweeps.yaml12 import Document, Plain, Route, read_yaml

SELF = "_self_"
KEYS_OF_A_SEARCH = ("minimize", "maximize")
KEYS_OF_DRAWING = ("samples", "draw_seed")
KEYS = (
    "defaults",
    "about",
    "config",
    "set",
    "sweep",
    "axes",
    "seeds",
    *KEYS_OF_DRAWING,
    *KEYS_OF_A_SEARCH,
)
KINDS = ("grid", "zip", "random", "optuna")
SEEDS = 3

Setting = dict[str, str]  # symbol without prefix -> raw value, as on a command line


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """points: what differs between the arms of the study; each is trained with every seed.

    search: what a search chooses the points from; there are none before.
    places: a symbol and the value that it is given, or None -> where that is written (file:line).
    """

    name: str
    about: str
    config: str
    settings: Setting
    points: tuple[Setting, ...]
    seeds: tuple[int, ...]
    search: Search | None
    places: Mapping[tuple[str, str | None], str]

    def runs(self) -> Iterator[tuple[int, Setting]]:
        """The number of the point, and all that is set, for each run."""
        for (number, point), seed in itertools.product(enumerate(self.points), self.seeds):
            yield number, {**self.settings, **point, "SEED": str(seed)}

    def place(self, name: str, value: str) -> str:
        """Where the symbol `name` is given that value."""
        return self.places.get((name, value)) or self.places[name, None]


def read_experiment(file: Path) -> Experiment:
    """Raises ConfigError, with file and line, for what is no experiment."""
    document = merged(file)
    content = document.content
    if not isinstance(content.get("config"), str):
        todo = "config: NAME, one of make list-defconfigs"
        raise ConfigError(f"{document.place('config')} names no configuration", todo=todo)
    settings = {name: value for name, value in _mapping(document, "set").items() if value is not None}
    axes = _mapping(document, "axes")
    for key, symbols in (("set", settings), ("axes", axes)):
        if "SEED" in symbols:
            place = document.place(key, "SEED")
            raise ConfigError(f"{place}: SEED comes from seeds", todo="seeds: a number of them, or a list")
    searched = content.get("sweep") == "optuna"
    _check_keys_of(document)
    return Experiment(
        name=file.stem,
        about=str(content.get("about", "")),
        config=str(content["config"]),
        settings={name: raw(value) for name, value in settings.items()},
        points=() if searched else tuple(_points(document, axes)),
        seeds=_seeds(document),
        search=search_of(document, axes) if searched else None,
        places=dict(_places(document, settings, axes)),
    )


def _places(
    document: Document, settings: Mapping[str, Plain], axes: Mapping[str, Plain]
) -> Iterator[tuple[tuple[str, str | None], str]]:
    """Of settings, then of axes, which win over them; where a search will propose a value, of its axis."""
    yield ("SEED", None), document.place("seeds")
    for name in settings:
        yield (name, None), document.place("set", name)
    for name, axis in axes.items():
        yield (name, None), document.place("axes", name)
        if isinstance(axis, list):
            for number, value in enumerate(axis):
                yield (name, raw(value)), document.place("axes", name, number)


def merged(file: Path, *, above: tuple[Path, ...] = ()) -> Document:
    """`file` with its defaults, which are files beside it, laid under or over it. `defaults` is gone.

    Raises ConfigError for a circle, and for a key that is not known.
    """
    real = file.resolve()
    if real in above:
        circle = " -> ".join(path.name for path in (*above, real))
        raise ConfigError(f"{real.name} is laid upon itself", why=circle)
    own = read_yaml(file)
    for key in own.content:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            raise ConfigError(
                f"{own.place(key)}: there is no key {key}",
                todo=f"did you mean {close[0]}?" if close else f"there are {', '.join(KEYS)}",
            )
    layers = own.content.get("defaults", [])
    if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        raise ConfigError(f"{own.place('defaults')}: defaults is not a list of names")
    names = [str(layer) for layer in layers]
    content: dict[str, Plain] = {}
    places: dict[Route, str] = {}
    for name in names if SELF in names else [*names, SELF]:
        layer = own if name == SELF else merged(_beside(own, name), above=(*above, real))
        content = laid_over(content, layer.content)
        places |= layer.places  # those of a list that was replaced by a shorter one lead to nothing
    content.pop("defaults", None)
    return Document(file=file, content=content, places=places)


def _beside(document: Document, name: str) -> Path:
    found = document.file.parent / f"{name}.yaml"
    if not found.is_file():
        place = document.place("defaults")
        raise ConfigError(f"{place}: there is no {found.name} beside it", todo="defaults names such files")
    return found


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged, everything else is replaced."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = laid_over(result[key], value) if both else value
    return result


def raw(value: Plain) -> str:
    """As it is written on a command line."""
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, list):
        return ",".join(map(raw, value))
    return str(value)


def _check_keys_of(document: Document) -> None:
    """Raises ConfigError for what another kind of sweep would read, and this one would not."""
    given = [key for key, value in document.content.items() if value is not None]
    kind = document.content.get("sweep", "grid")
    for key in given:
        if key in KEYS_OF_A_SEARCH and kind != "optuna":
            raise ConfigError(f"{document.place(key)}: {key} is for sweep: optuna")
        if key in KEYS_OF_DRAWING and kind in ("grid", "zip"):
            raise ConfigError(f"{document.place(key)}: {key} is for sweep: random or optuna")


def _mapping(document: Document, key: str) -> Mapping[str, Plain]:
    found = document.content.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{document.place(key)}: {key} is not a mapping of symbols to values")
    for name in found:
        if name.startswith("CONFIG_"):
            raise ConfigError(f"{document.place(key, name)}: {name} is written without CONFIG_ here")
    return found


def _points(document: Document, axes: Mapping[str, Plain]) -> Iterator[Setting]:
    kind = document.content.get("sweep", "grid")
    if kind not in KINDS:
        todo = f"one of {', '.join(KINDS)}"
        raise ConfigError(f"{document.place('sweep')}: there is no sweep {kind}", todo=todo)
    values: dict[str, list[Plain]] = {}
    for name, axis in axes.items():
        if not isinstance(axis, list) or not axis:
            raise ConfigError(f"{document.place('axes', name)}: the axis {name} is not a list of values")
        values[name] = axis
    lengths = sorted({len(axis) for axis in values.values()})
    if kind == "zip" and len(lengths) > 1:
        raise ConfigError(f"{document.place('axes')}: axes that are zipped have one length, not {lengths}")
    if kind == "random":
        yield from _drawn(document, values)
        return
    combine = zip if kind == "zip" else itertools.product
    for point in combine(*values.values()) if values else [()]:
        yield {name: raw(value) for name, value in zip(values, point, strict=True)}


def _drawn(document: Document, values: dict[str, list[Plain]]) -> Iterator[Setting]:
    """Different points of the grid at random."""
    samples, seed = document.content.get("samples"), document.content.get("draw_seed", 1)
    if not is_whole(samples) or samples < 1 or not is_whole(seed):
        raise ConfigError(f"{document.place('samples')}: a random sweep needs samples: NUMBER")
    count = math.prod(map(len, values.values()))
    for number in Random(seed).sample(range(count), min(samples, count)):
        yield _numbered(values, number)


def _numbered(values: dict[str, list[Plain]], number: int) -> Setting:
    """The point of the grid that would be the `number`-th of all, of which there may be too many to list."""
    point = dict[str, str]()
    for name in reversed(values):
        number, place = divmod(number, len(values[name]))
        point[name] = raw(values[name][place])
    return {name: point[name] for name in values}


def _seeds(document: Document) -> tuple[int, ...]:
    asked = document.content.get("seeds", SEEDS)
    if is_whole(asked) and asked > 0:
        return tuple(range(1, asked + 1))
    if isinstance(asked, list) and asked and all(map(is_whole, asked)):
        seeds = tuple(seed for seed in asked if is_whole(seed))
        if len(set(seeds)) < len(seeds):
            raise ConfigError(
                f"{document.place('seeds')}: a seed is there twice", why="the same run twice has no spread"
            )
        return seeds
    raise ConfigError(
        f"{document.place('seeds')}: seeds is a number of them or a list", todo="seeds: 3 is seeds: [1, 2, 3]"
    )
