"""make curve: a run's evaluations over examples seen.

Prints when the run reached a threshold, and compares it with a reference: a stored curve or another run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lib import atomic
from lib.errors import ConfigError, ToolkitError, os_errors, run_main
from lib.reports.series import Series, series_of
from lib.runs import metrics
from lib.runs.directory import RunDir, resolve_run
from lib.runs.index import stored
from lib.units import non_negative, setting

THRESHOLD, TOLERANCE = 0.85, 0.05


class Curve(NamedTuple):
    """One column of each evaluation. Points ascend in examples: optimizer steps times the effective batch."""

    run: str
    column: str
    points: tuple[tuple[int, float], ...]  # examples seen, and the value then

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


def curve_of(series: Sequence[Series], *, run: str, column: str, effective_batch: int) -> Curve:
    """Return the curve of a column of the evaluations. column: "" takes the first of metrics.PREFERRED.

    Raises ConfigError if no evaluation has such a column.
    """
    present = {each.column: each for each in series if each.kind == "eval"}
    if (wanted := column or metrics.preferred(present)) not in present:
        known = ", ".join(name for name in present if name != "epoch")
        todo = f"COLUMN= is one of {known}" if known else ""
        raise ConfigError(f"no evaluation of {run} has {column or 'a number'}", todo=todo)
    found = present[wanted]
    points = ((step * effective_batch, value) for step, value in zip(found.steps, found.values, strict=True))
    return Curve(run, wanted, tuple(points))


def compare(curve: Curve, reference: Curve) -> list[tuple[int, float, float]]:
    """Return examples, value of the reference and of the run, from the run's first evaluation on.

    The run's value is interpolated; it is nan after its last evaluation. Raises ConfigError if the curves
    have different columns or no examples in common.
    """
    if curve.column != reference.column:
        what = f"{reference.run} is a curve of {reference.column}, not of {curve.column}"
        raise ConfigError(what, todo=f"give {setting('COLUMN', reference.column)}")
    begin, end = curve.points[0][0], reference.points[-1][0]
    if begin > end:
        why = f"one begins at {begin:,}, the other ends at {end:,}"
        raise ConfigError(f"{curve.run} and {reference.run} have no examples in common", why=why)
    places, values = zip(*curve.points, strict=True)
    return [
        (at, value, float(np.interp(at, places, values, right=math.nan)))
        for at, value in reference.points
        if at >= begin
    ]


def store(curve: Curve, file: Path) -> None:
    """Write a reference curve to a file. Raises ToolkitError if it cannot be written."""
    atomic.save(file, json.dumps(curve._asdict(), indent=1) + "\n")


def read_stored(file: Path) -> Curve:
    """Read a reference curve. Raises ToolkitError if it cannot be read, ConfigError if it is none."""
    try:
        with os_errors("read"):
            content = json.loads(file.read_text(encoding="utf-8"))
        points = tuple((int(examples), float(value)) for examples, value in content["points"])
        if not points or not all(math.isfinite(value) for _, value in points):
            raise ValueError("no points, or one is not finite")
        return Curve(str(content["run"]), str(content["column"]), points)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        why, todo = f"{type(error).__name__}: {error}", "make curve OUT=FILE.json stores one"
        raise ConfigError(f"{file} is not a stored curve", why=why, todo=todo) from error


def main() -> int:
    """Print the curve of a run; with REFERENCE=, fail where it differs by more than the tolerance."""
    parser = argparse.ArgumentParser(prog="curve", description=__doc__)
    parser.add_argument("run", nargs="?", default="", help="path, name or its beginning; newest")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    parser.add_argument("--column", default="", help="of evaluations; default: an accuracy, or the loss")
    threshold, tolerance = (partial(non_negative, variable=name) for name in ("THRESHOLD", "TOLERANCE"))
    parser.add_argument("--threshold", type=threshold, help=f"default: {THRESHOLD}, of an accuracy")
    parser.add_argument("--reference", default="", help="a file written by OUT=, or another run")
    parser.add_argument("--tolerance", type=tolerance, help=f"of the comparison; default: {TOLERANCE}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="store the curve as a reference")
    options = parser.parse_args()
    if options.tolerance is not None and not options.reference:
        raise ConfigError("TOLERANCE= needs a comparison", todo="give REFERENCE=, too")
    if options.out:
        atomic.check_writable(options.out, "OUT", log=print, suffixes=[".json"])
    reference = _reference(options.runs, options.reference, column=options.column)
    column = options.column or (reference.column if reference else "")
    curve = _curve(resolve_run(options.runs, options.run), column=column)
    _print_curve(curve, options.threshold)
    if options.out:
        store(curve, options.out)
        print(f"stored as {options.out}")
    if reference:
        _print_comparison(curve, reference, TOLERANCE if options.tolerance is None else options.tolerance)
    return 0


def _curve(run: RunDir, *, column: str) -> Curve:
    effective_batch = stored(run, "plan", lambda plan: int(plan["effective_batch"]))
    series = series_of(metrics.rows(run.metrics))
    return curve_of(series, run=f"{run.model}/{run.name}", column=column, effective_batch=effective_batch)


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


def _print_comparison(curve: Curve, reference: Curve, tolerance: float) -> None:
    points = compare(curve, reference)
    print(f"compared with {reference.run}")
    outside = 0
    for examples, wanted, value in points:
        is_near = abs(value - wanted) <= tolerance
        outside += not is_near
        here, mark = "no evaluation" if math.isnan(value) else f"{value:.4f}", "" if is_near else "  outside"
        print(f"{examples:>14,}  {here}  reference {wanted:.4f}{mark}")
    if outside:
        far = f"are not within {tolerance:g} of {reference.run}"
        raise ToolkitError(f"{outside} of {len(points)} points of {curve.run} {far}")
    print(f"all {len(points)} points are within {tolerance:g}")


if __name__ == "__main__":
    raise SystemExit(run_main(main))
