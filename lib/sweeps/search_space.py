"""What a search may choose from: `axes` of an experiment file whose sweep is optuna.

sweep: optuna
samples: 20
minimize: loss                                  # or maximize: a figure of the last evaluation
axes:
  EMA: [true, false]                            # one of these
  LEARNING_RATE: {low: 1e-4, high: 1e-1, log: true}
  LENGTH: {low: 2, high: 8, step: 2}            # a whole number where low and high are
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from lib.errors import ConfigError
from lib.sweeps.yaml12 import Document, Plain

_OF_A_RANGE = {"low", "high", "log", "step"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From `low` to `high`, both included, in steps of `step`; whole numbers where all of these are."""

    low: float
    high: float
    step: float | None
    log: bool

    @property
    def is_whole(self) -> bool:
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 0))


Axis = tuple[Plain, ...] | Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """samples: points to try. figure: of the last evaluation, whose mean over the seeds is to be best."""

    axes: Mapping[str, Axis]
    samples: int
    figure: str
    maximize: bool
    draw_seed: int


def search_of(document: Document, axes: Mapping[str, Plain]) -> Search:
    """Raises ConfigError, naming file and line, for what is no search."""
    content, place = document.content, document.place
    samples, seed = content.get("samples"), content.get("draw_seed", 1)
    if not is_whole(samples) or samples < 1 or not is_whole(seed):
        raise ConfigError(f"{place('samples')}: a search needs samples: NUMBER")
    wanted = [(key, content[key]) for key in ("minimize", "maximize") if key in content]
    if len(wanted) != 1 or not isinstance(wanted[0][1], str):
        raise ConfigError(f"{place('sweep')}: a search needs minimize: FIGURE or maximize: FIGURE")
    if not axes:
        raise ConfigError(f"{place('sweep')}: a search needs axes")
    key, figure = wanted[0]
    found = {name: _axis(place("axes", name), name, axis) for name, axis in axes.items()}
    return Search(axes=found, samples=samples, figure=str(figure), maximize=key == "maximize", draw_seed=seed)


def _axis(place: str, name: str, axis: Plain) -> Axis:
    if isinstance(axis, list) and axis:
        return tuple(axis)
    if not isinstance(axis, dict) or not {"low", "high"} <= set(axis) <= _OF_A_RANGE:
        why = "a list of values, or a mapping with low and high, and log or step"
        raise ConfigError(f"{place}: the axis {name} is nothing to choose from", why=f"it is not {why}")
    low, high, step, log = axis["low"], axis["high"], axis.get("step"), axis.get("log", False)
    if not (_is_number(low) and _is_number(high) and low < high):
        raise ConfigError(f"{place}: the axis {name} does not go from a number to a larger one")
    if not (isinstance(log, bool) and (step is None or _is_number(step))):
        raise ConfigError(f"{place}: the axis {name} has no number as step, or log is not true or false")
    if step is not None and (log or step <= 0):
        raise ConfigError(f"{place}: the axis {name} has a step", why="it is to be above 0, without log")
    if log and low <= 0:
        raise ConfigError(f"{place}: the axis {name} begins at {low}", why="a logarithm needs more than 0")
    return Range(low=low, high=high, step=step, log=log)


def is_whole(value: Plain) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Plain) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
