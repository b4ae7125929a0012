"""Search spaces: the `axes` of an experiment file whose sweep is optuna.

sweep: optuna
samples: 20
minimize: loss                                  # or maximize: a metric of the last evaluation
axes:
  EMA: [true, false]                            # one of these
  LEARNING_RATE: {low: 1e-4, high: 1e-1, log: true}
  LENGTH: {low: 2, high: 8, step: 2}            # a whole number where low and high are
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from lib.sweeps.yaml12 import Document, Plain

_RANGE_KEYS = {"low", "high", "log", "step"}


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


def search_of(document: Document, axes: Mapping[str, Plain]) -> Search:
    """Return the search of an experiment file. Raises ConfigError, with file and line, where malformed."""
    samples, draw_seed = draws_of(document, "search")
    goals = [(key, document.content[key]) for key in ("minimize", "maximize") if key in document.content]
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


def draws_of(document: Document, noun: str) -> tuple[int, int]:
    """Return `samples` and `draw_seed`. Raises ConfigError where the `noun` lacks a number of samples."""
    samples, seed = document.content.get("samples"), document.content.get("draw_seed", 1)
    if not is_whole(samples) or samples < 1 or not is_whole(seed):
        raise document.error("samples", fault=f"a {noun} needs samples: NUMBER")
    return samples, seed


def is_whole(value: Plain) -> TypeGuard[int]:
    """True for an int that is no bool."""
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
