"""make curve: a run's evaluations over examples seen.

Prints when the run reached a threshold, and compares it with a reference: a stored curve or another run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lib import atomic
from lib.errors import ConfigError, ToolkitError, os_error, os_errors, run_main
from lib.runs import metrics
from lib.runs.directory import RunDir, resolve_run

THRESHOLD, TOLERANCE = 0.85, 0.05

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
        sign = 1.0 if metrics.higher_is_better(self.column) else -1.0
        start, before = self.points[0]
        for examples, value in self.points:
            if sign * value >= sign * threshold:
                share = (threshold - before) / (value - before) if examples > start else 0.0
                return start + share * (examples - start)
            start, before = examples, value
        return None

    def at(self, examples: int) -> float | None:
        """Return the interpolated value; None before the first or after the last evaluation."""
        where, values = zip(*self.points, strict=True)
        inside = where[0] <= examples <= where[-1]
        return float(np.interp(examples, where, values)) if inside else None


class Comparison(NamedTuple):
    """One point of the reference and the run's value there; None if no evaluations enclose the point."""

    examples: int
    reference: float
    value: float | None

    def within(self, tolerance: float) -> bool:
        """Return True if the two differ by at most `tolerance`; False if the run has no value there."""
        return self.value is not None and abs(self.value - self.reference) <= tolerance


def curve_of(rows: Sequence[Mapping[str, Any]], *, run: str, column: str, effective_batch: int) -> Curve:
    """Return the curve in rows of metrics.jsonl. column: "" takes the first of metrics.PREFERRED there is.

    Raises ConfigError if no evaluation has such a column.
    """
    evaluations = [row for row in rows if row.get("kind") == "eval"]
    present = dict.fromkeys(
        name for row in evaluations for name, value in row.items() if isinstance(value, int | float)
    )
    wanted = column or next((name for name in metrics.PREFERRED if name in present), "")
    if wanted not in present:
        known = ", ".join(name for name in present if name not in ("step", "epoch"))
        raise ConfigError(
            f"no evaluation of {run} has {column or 'a number'}",
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
    begin, end = curve.points[0][0], reference.points[-1][0]
    found = [Comparison(at, value, curve.at(at)) for at, value in reference.points if at >= begin]
    if not found:
        raise ConfigError(
            f"{curve.run} and {reference.run} have no examples in common",
            why=f"one begins at {begin:,}, the other ends at {end:,}",
        )
    return found


def store(curve: Curve, file: Path) -> None:
    """Write a reference curve to a file. Raises ToolkitError if it cannot be written."""
    content = {"run": curve.run, "column": curve.column, "points": curve.points}
    with os_errors("write"):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps(content, indent=1) + "\n")


def read_stored(file: Path) -> Curve:
    """Read a reference curve. Raises ToolkitError if the file is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        points = tuple((int(examples), float(value)) for examples, value in content["points"])
        curve = Curve(run=str(content["run"]), column=str(content["column"]), points=points)
    except OSError as error:
        raise os_error("read", error) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ToolkitError(f"{file} is not a stored curve", why=f"{type(error).__name__}: {error}") from error
    if not points or not all(math.isfinite(value) for _, value in points):
        raise ToolkitError(f"{file} is not a stored curve", why="no points, or one is not finite")
    return curve


def main() -> int:
    """Print the curve of a run; with REFERENCE=, fail where it differs by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="curve", description=__doc__)
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="path, name or its beginning; newest"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    parser.add_argument("--column", default="", help="of evaluations; default: an accuracy, or the loss")
    parser.add_argument(
        "--threshold", type=partial(_number, "THRESHOLD"), help=f"default: {THRESHOLD}, of an accuracy"
    )
    parser.add_argument("--reference", default="", help="a file written by OUT=, or another run")
    parser.add_argument(
        "--tolerance", type=partial(_number, "TOLERANCE"), help=f"of the comparison; default: {TOLERANCE}"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="store the curve as a reference")
    options = parser.parse_args()
    if options.tolerance is not None and not options.reference:
        raise ConfigError("TOLERANCE= needs a comparison", todo="give REFERENCE=, too")
    reference = _reference(options.runs, options.reference, column=options.column)
    column = options.column or (reference.column if reference else "")
    curve = _curve(resolve_run(options.runs, options.run), column=column)
    _print_curve(curve, options.threshold)
    if options.out:
        store(curve, options.out)
        print(f"stored as {options.out}")
    if reference:
        tolerance = TOLERANCE if options.tolerance is None else options.tolerance
        _print_comparison(compare(curve, reference), curve, reference, tolerance=tolerance)
    return 0


def _curve(run: RunDir, *, column: str) -> Curve:
    try:
        effective_batch = int(run.read_json("plan")["effective_batch"])
    except (KeyError, TypeError, ValueError) as error:
        raise ToolkitError(
            f"plan.json of {run.path} is of another version", why=f"{type(error).__name__}: {error}"
        ) from error
    name = f"{run.model}/{run.name}"
    return curve_of(metrics.read(run.metrics), run=name, column=column, effective_batch=effective_batch)


def _reference(runs: Path, name: str, *, column: str) -> Curve | None:
    """Return a stored curve, or that of a run; None without a name."""
    if not name:
        return None
    if Path(name).is_file():
        return read_stored(Path(name))
    try:
        run = resolve_run(runs, name)
    except ToolkitError as error:
        raise ConfigError(f"REFERENCE={name} is neither a file nor a run", why=str(error)) from error
    return _curve(run, column=column)


def _print_curve(curve: Curve, threshold: float | None) -> None:
    print(f"{curve.run}, {curve.column}")
    for examples, value in curve.points:
        print(f"{examples:>14,}  {value:.4f}")
    if threshold is None and not curve.column.endswith("accuracy"):
        return
    threshold = THRESHOLD if threshold is None else threshold
    reached = curve.examples_to(threshold)
    if reached is None:
        print(f"{threshold:g} was not reached in {curve.points[-1][0]:,} examples")
    elif reached == curve.points[0][0]:
        print(f"{threshold:g} was reached by the first evaluation, in {reached:,.0f} examples or fewer")
    else:
        print(f"{threshold:g} was reached in about {reached:,.0f} examples")


def _print_comparison(
    points: Sequence[Comparison], curve: Curve, reference: Curve, *, tolerance: float
) -> None:
    print(f"compared with {reference.run}")
    for point in points:
        here = "no evaluation" if point.value is None else f"{point.value:.4f}"
        mark = "" if point.within(tolerance) else "  outside"
        print(f"{point.examples:>14,}  {here}  reference {point.reference:.4f}{mark}")
    if outside := sum(not point.within(tolerance) for point in points):
        far = f"are not within {tolerance:g} of {reference.run}"
        raise ToolkitError(f"{outside} of {len(points)} points of {curve.run} {far}")
    print(f"all {len(points)} points are within {tolerance:g}")


def _number(variable: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{variable}={text} is not a non-negative number")
    return number


if __name__ == "__main__":
    raise SystemExit(run_main(main))
