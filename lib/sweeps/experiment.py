"""Experiment files: a base configuration, the settings changed in it, and the axes to sweep.

    defaults: [_self_, other]      # files merged below this one, or (after _self_) on top of it
    about: one sentence
    config: trm-sudoku4+fp32       # a shipped configuration, or alldefconfig: all defaults
    set: {MAX_STEPS: 200}          # symbols without CONFIG_
    sweep: grid                    # or zip, random or optuna
    axes: {EMA: [true, false]}
    seeds: 3                       # a number, counted from 1, or a list
    samples: 20                    # of a random sweep or a search, drawn with draw_seed

Mappings are merged key by key, lists and values replaced; null removes a symbol from `set`. An optuna sweep
is a search: it has an objective, and its axes may be ranges:

    minimize: loss                 # or maximize: a metric of the last evaluation
    axes:
      LEARNING_RATE: {low: 1e-4, high: 1e-1, log: true}
      LENGTH: {low: 2, high: 8, step: 2}        # a whole number where low and high are

Sections of nested files (model: {H_cycles: 3}) stand for symbols: lib/sweeps/nested_keys.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeGuard

from lib.errors import ConfigError, meant
from lib.sweeps.nested_keys import tables, with_symbols
from lib.sweeps.yaml12 import Document, Plain, Route, read_yaml

SELF = "_self_"
SEARCH_KEYS = ("minimize", "maximize")
DRAW_KEYS = ("samples", "draw_seed")
KEYS = ("defaults", "about", "config", "set", "sweep", "axes", "seeds", *DRAW_KEYS, *SEARCH_KEYS)
KINDS = ("grid", "zip", "random", "optuna")
SEEDS = 3
_RANGE_KEYS = {"low", "high", "log", "step"}

Setting = dict[str, str]  # symbol without prefix -> raw value, as on a command line


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, both included, in steps of `step`; whole where all three are."""

    low: float
    high: float
    step: float | None
    log: bool

    @property
    def is_whole(self) -> bool:
        """True if only whole numbers are proposed."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 0))


Axis = tuple[Plain, ...] | Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search space and its objective.

    samples: number of points to try.
    figure:  metric of the last evaluation, whose mean over the seeds is optimised.
    """

    axes: Mapping[str, Axis]
    samples: int
    figure: str
    maximize: bool
    draw_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Contents of an experiment file.

    points: settings of each point; each is trained with every seed.
    search: search space from which Optuna proposes the points; None where the file lists them.
    places: a symbol and its value, or None -> file:line of the assignment; that of config, too.
    notices: of keys that set nothing here.
    best_metric: CONFIG_BEST_METRIC of all runs; "" until they are resolved, and where it differs.
    """

    name: str
    about: str
    config: str
    settings: Setting
    points: tuple[Setting, ...]
    seeds: tuple[int, ...]
    search: Search | None
    places: Mapping[tuple[str, str | None], str]
    notices: tuple[str, ...] = ()
    best_metric: str = ""

    def runs(self) -> Iterator[tuple[int, Setting]]:
        """Yield the index of the point and all settings of each run."""
        for (number, point), seed in itertools.product(enumerate(self.points), self.seeds):
            yield number, {**self.settings, **point, "SEED": str(seed)}

    def place(self, name: str, value: str) -> str:
        """Return file:line of the assignment of `value` to the symbol `name`."""
        return self.places.get((name, value)) or self.places[name, None]


def read_experiment(file: Path) -> Experiment:
    """Read an experiment file. Raises ConfigError, with file and line, where it is malformed."""
    document, notices = with_symbols(merged(file), raw)
    content = document.content
    if not isinstance(content.get("config"), str):
        todo = "config: NAME, one of make list-defconfigs"
        raise ConfigError(f"{document.place('config')} names no configuration", todo=todo)
    settings = {name: value for name, value in _mapping(document, "set").items() if value is not None}
    axes = _mapping(document, "axes")
    for name in settings:
        document.check_value(settings[name], "set", name)
    for name, axis in axes.items():
        for index, value in enumerate(axis if isinstance(axis, list) else ()):
            document.check_value(value, "axes", name, index)
    for key, symbols in (("set", settings), ("axes", axes)):
        if "SEED" in symbols:
            todo = "write seeds: a number or a list"
            raise document.error(key, "SEED", fault="SEED comes from seeds", todo=todo)
    kind = content.get("sweep", "grid")
    for key in (key for key, value in content.items() if value is not None):  # read by some kinds only
        if key in SEARCH_KEYS and kind != "optuna":
            raise document.error(key, fault=f"{key} is for sweep: optuna")
        if key in DRAW_KEYS and kind in ("grid", "zip"):
            raise document.error(key, fault=f"{key} is for sweep: random or optuna")
    is_search = kind == "optuna"
    return Experiment(
        name=file.stem,
        about=str(content.get("about", "")),
        config=str(content["config"]),
        settings={name: raw(value) for name, value in settings.items()},
        points=() if is_search else tuple(_points(document, axes)),
        seeds=_seeds(document),
        search=_search(document, axes) if is_search else None,
        places=dict(_places(document, settings, axes)),
        notices=notices,
    )


def merged(file: Path, *, above: tuple[Path, ...] = ()) -> Document:
    """Return `file` merged with those that its `defaults` name. Raises ConfigError for a cycle or bad key."""
    real = file.resolve()
    if real in above:
        cycle = " -> ".join(path.name for path in (*above, real))
        raise ConfigError(f"the defaults of {real.name} lead back to it", why=cycle)
    own = read_yaml(file)
    for key in own.content:
        if key not in (*KEYS, *tables()):
            raise own.error(key, fault=f"there is no key {key}", todo=meant(key, KEYS))
    layers = own.content.get("defaults", [])
    if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
        raise own.error("defaults", fault="defaults is not a list of names")
    names = [str(layer) for layer in layers]
    content: dict[str, Plain] = {}
    places: dict[Route, str] = {}
    for name in names if SELF in names else [*names, SELF]:
        layer = own
        if name != SELF:
            beside, above_it = (folder / f"{name}.yaml" for folder in (file.parent, real.parent.parent))
            path = beside if beside.is_file() else above_it
            if not path.is_file():
                fault, todo = f"there is no {path.name} beside it or above", "defaults names such files"
                raise own.error("defaults", fault=fault, todo=todo)
            layer = merged(path, above=(*above, real))
        content = _merge(content, layer.content)
        places |= layer.places  # may keep items of a longer list that was replaced, which nothing looks up
    content.pop("defaults", None)
    return Document(file=file, content=content, places=places)


def raw(value: Plain) -> str:
    """Format a value as on a command line: y or n, a number, a string, or a list with commas."""
    if isinstance(value, bool):
        return "y" if value else "n"
    return ",".join(map(raw, value)) if isinstance(value, list) else str(value)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings recursively; `above` replaces everything else."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merge(result[key], value) if both else value
    return result


def _places(
    document: Document, settings: Mapping[str, Plain], axes: Mapping[str, Plain]
) -> Iterator[tuple[tuple[str, str | None], str]]:
    """Yield the places of settings, then of axes, which override them."""
    yield ("SEED", None), document.place("seeds")
    yield ("config", None), document.place("config")
    for name in settings:
        yield (name, None), document.place("set", name)
    for name, axis in axes.items():
        yield (name, None), document.place("axes", name)
        for index, value in enumerate(axis if isinstance(axis, list) else ()):
            yield (name, raw(value)), document.place("axes", name, index)


def _mapping(document: Document, key: str) -> Mapping[str, Plain]:
    mapping = document.content.get(key)
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise document.error(key, fault=f"{key} is not a mapping of symbols to values")
    for name in mapping:
        if name.startswith("CONFIG_"):
            raise document.error(key, name, fault=f"{name} is written without CONFIG_ here")
    return mapping


def _points(document: Document, axes: Mapping[str, Plain]) -> Iterator[Setting]:
    kind = document.content.get("sweep", "grid")
    if kind not in KINDS:
        raise document.error("sweep", fault=f"there is no sweep {kind}", todo=f"one of {', '.join(KINDS)}")
    values: dict[str, list[Plain]] = {}
    for name, axis in axes.items():
        if not isinstance(axis, list) or not axis:
            raise document.error("axes", name, fault=f"the axis {name} is empty or no list of values")
        values[name] = axis
    lengths = sorted({len(axis) for axis in values.values()})
    if kind == "zip" and len(lengths) > 1:
        raise document.error("axes", fault=f"axes that are zipped have one length, not {lengths}")
    if kind == "random":
        samples, seed = _draws(document, "random sweep")
        count = math.prod(map(len, values.values()))
        for number in Random(seed).sample(range(count), min(samples, count)):
            yield _grid_point(values, number)
        return
    combine = zip if kind == "zip" else itertools.product
    for point in combine(*values.values()) if values else [()]:
        yield {name: raw(value) for name, value in zip(values, point, strict=True)}


def _grid_point(values: dict[str, list[Plain]], number: int) -> Setting:
    """Return the point at index `number` of the grid, which may be too large to list."""
    point: Setting = {}
    for name in reversed(values):
        number, index = divmod(number, len(values[name]))
        point[name] = raw(values[name][index])
    return {name: point[name] for name in values}


def _seeds(document: Document) -> tuple[int, ...]:
    seeds = document.content.get("seeds", SEEDS)
    if _is_whole(seeds) and seeds > 0:
        return tuple(range(1, seeds + 1))
    if not isinstance(seeds, list) or not seeds or not all(map(_is_whole, seeds)):
        todo = "seeds: 3 is seeds: [1, 2, 3]"
        raise document.error("seeds", fault="seeds is neither a number of seeds nor a list", todo=todo)
    numbers = tuple(seed for seed in seeds if _is_whole(seed))
    if len(set(numbers)) < len(numbers):
        why = "the same run twice has no spread"
        raise document.error("seeds", fault="a seed is given twice", why=why)
    return numbers


def _search(document: Document, axes: Mapping[str, Plain]) -> Search:
    samples, draw_seed = _draws(document, "search")
    goals = [(key, document.content[key]) for key in SEARCH_KEYS if key in document.content]
    if len(goals) != 1 or not isinstance(goals[0][1], str):
        raise document.error("sweep", fault="a search needs minimize: FIGURE or maximize: FIGURE")
    if not axes:
        raise document.error("sweep", fault="a search needs axes")
    return Search(
        axes={name: _axis(document, name, axis) for name, axis in axes.items()},
        samples=samples,
        figure=goals[0][1],
        maximize=goals[0][0] == "maximize",
        draw_seed=draw_seed,
    )


def _draws(document: Document, noun: str) -> tuple[int, int]:
    """Return `samples` and `draw_seed`. Raises ConfigError where the `noun` lacks a number of samples."""
    samples, seed = document.content.get("samples"), document.content.get("draw_seed", 1)
    if not _is_whole(samples) or samples < 1 or not _is_whole(seed):
        raise document.error("samples", fault=f"a {noun} needs samples: NUMBER")
    return samples, seed


def _is_whole(value: Plain) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _axis(document: Document, name: str, axis: Plain) -> Axis:
    if isinstance(axis, list) and axis:
        return tuple(axis)
    if not isinstance(axis, dict) or not {"low", "high"} <= set(axis) <= _RANGE_KEYS:
        why = "it is neither a list of values nor a mapping with low and high, and log or step"
        raise document.error("axes", name, fault=f"the axis {name} offers no choice", why=why)
    why = ""
    low, high, step, log = axis["low"], axis["high"], axis.get("step"), axis.get("log", False)
    if not (_is_number(low) and _is_number(high) and low < high):
        fault = "does not go from a number to a larger one"
    elif not (isinstance(log, bool) and (step is None or _is_number(step))):
        fault = "has no number as step, or log is not true or false"
    elif step is not None and (log or step <= 0):
        fault, why = "has a step", "it must be above 0, without log"
    elif log and low <= 0:
        fault, why = f"begins at {low}", "a logarithm needs more than 0"
    else:
        return Range(low=low, high=high, step=step, log=log)
    raise document.error("axes", name, fault=f"the axis {name} {fault}", why=why)


def _is_number(value: Plain) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
