"""Evaluation curves over examples seen: examples to reach a threshold, and comparison with a reference."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lib import atomic
from lib.errors import ConfigError, ToolkitError, os_error

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
PREFERRED = ("exact_accuracy", "accuracy", "loss")  # evaluation columns, in order, when none is requested

Point: TypeAlias = tuple[int, float]  # examples seen, and the value then


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One column of each evaluation. Points ascend in examples: optimizer steps times the effective batch."""

    run: str
    column: str
    points: tuple[Point, ...]

    def examples_to(self, threshold: float) -> float | None:
        """Return the examples needed to reach `threshold`, interpolated linearly; None if never reached.

        If the first evaluation is already past it: the examples of that one, an upper bound.
        """
        sign = -1.0 if self.column in LOWER_IS_BETTER else 1.0
        before: Point | None = None
        for examples, value in self.points:
            if sign * value >= sign * threshold:
                if before is None:
                    return float(examples)
                share = (threshold - before[1]) / (value - before[1])
                return before[0] + share * (examples - before[0])
            before = examples, value
        return None

    def at(self, examples: int) -> float | None:
        """Return the interpolated value; None before the first or after the last evaluation."""
        before: Point | None = None
        for point in self.points:
            if point[0] == examples:
                return point[1]
            if point[0] > examples:
                if before is None:
                    return None
                share = (examples - before[0]) / (point[0] - before[0])
                return before[1] + share * (point[1] - before[1])
            before = point
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One point of the reference and the run's value there; None if no evaluations enclose the point."""

    examples: int
    reference: float
    value: float | None

    def within(self, tolerance: float) -> bool:
        """Return True if the two differ by at most `tolerance`; False if the run has no value there."""
        return self.value is not None and abs(self.value - self.reference) <= tolerance


def curve_of(rows: Sequence[Mapping[str, Any]], *, run: str, column: str, effective_batch: int) -> Curve:
    """Return the curve in rows of metrics.jsonl. column: "" takes the first of PREFERRED that is present.

    Raises ConfigError if no evaluation has such a column.
    """
    evaluations = [row for row in rows if row.get("kind") == "eval"]
    told = dict.fromkeys(
        name for row in evaluations for name, value in row.items() if isinstance(value, int | float)
    )
    wanted = column or next((name for name in PREFERRED if name in told), "")
    if wanted not in told:
        known = ", ".join(name for name in told if name not in ("step", "epoch"))
        raise ConfigError(
            f"no evaluation of {run} tells {column or 'anything'}",
            todo=f"COLUMN= is one of {known}" if known else "",
        )
    points = tuple(
        (row["step"] * effective_batch, row[wanted]) for row in evaluations if row.get(wanted) is not None
    )
    return Curve(run=run, column=wanted, points=points)


def compare(curve: Curve, reference: Curve) -> list[Comparison]:
    """Compare the run with each point of the reference, from the run's first evaluation on.

    Raises ConfigError if the curves have different columns or no examples in common.
    """
    if curve.column != reference.column:
        raise ConfigError(
            f"{reference.run} is a curve of {reference.column}, not of {curve.column}",
            todo=f"give COLUMN={reference.column}",
        )
    found = [
        Comparison(examples=examples, reference=value, value=curve.at(examples))
        for examples, value in reference.points
        if examples >= curve.points[0][0]
    ]
    if not found:
        raise ConfigError(
            f"{curve.run} and {reference.run} have no examples in common",
            why=f"one begins at {curve.points[0][0]:,}, the other ends at {reference.points[-1][0]:,}",
        )
    return found


def store(curve: Curve, file: Path) -> None:
    """Write a reference curve to a file. Raises ToolkitError if it cannot be written."""
    content = {"run": curve.run, "column": curve.column, "points": curve.points}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise os_error("write", error) from error


def stored(file: Path) -> Curve:
    """Read a reference curve. Raises ToolkitError if the file is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        points = tuple((int(examples), float(value)) for examples, value in content["points"])
        curve = Curve(run=str(content["run"]), column=str(content["column"]), points=points)
    except OSError as error:
        raise os_error("read", error) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ToolkitError(f"{file} is no stored curve", why=f"{type(error).__name__}: {error}") from error
    if not points or not all(math.isfinite(value) for _, value in points):
        raise ToolkitError(f"{file} is no stored curve", why="it has no points, or one that is no number")
    return curve
