"""make curve: a run's evaluations over examples: when it reached a bar, and how near it is to another run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lib.errors import ConfigError, ToolkitError, run_main
from lib.runs import metrics
from lib.runs.curve import Comparison, Curve, compare, curve_of, store, stored
from lib.runs.directory import RunDir, resolve_run

THRESHOLD, TOLERANCE = 0.85, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(prog="curve", description=__doc__)
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="path, name or its beginning; newest"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    parser.add_argument(
        "--column", default="", help="a figure of evaluations; default: an accuracy, or the loss"
    )
    parser.add_argument("--threshold", default="", help=f"the bar; default: {THRESHOLD}, of an accuracy")
    parser.add_argument("--reference", default="", help="a file that OUT= has made, or another run")
    parser.add_argument("--tolerance", default="", help=f"of the comparison; default: {TOLERANCE}")
    parser.add_argument(
        "--out", type=Path, default=None, metavar="FILE", help="store the curve as a reference"
    )
    options = parser.parse_args()
    if options.tolerance and not options.reference:
        raise ConfigError("TOLERANCE= is of a comparison", todo="give REFERENCE=, too")
    tolerance = _number("TOLERANCE", options.tolerance, default=TOLERANCE)
    reference = _reference(options.runs, options.reference, column=options.column)
    column = options.column or (reference.column if reference else "")
    curve = _curve(resolve_run(options.runs, options.run), column=column)
    _tell(curve, options.threshold)
    if options.out:
        store(curve, options.out)
        print(f"stored as {options.out}")
    if reference:
        _judge(compare(curve, reference), curve, reference, tolerance=tolerance)
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
    """A stored curve, or that of a run; None without a name."""
    if not name:
        return None
    if Path(name).is_file():
        return stored(Path(name))
    try:
        run = resolve_run(runs, name)
    except ToolkitError as error:
        raise ConfigError(f"REFERENCE={name} is neither a file nor a run", why=str(error)) from error
    return _curve(run, column=column)


def _tell(curve: Curve, asked: str) -> None:
    print(f"{curve.run}, {curve.column}")
    for examples, value in curve.points:
        print(f"{examples:>14,}  {value:.4f}")
    if not asked and not curve.column.endswith("accuracy"):
        return
    threshold = _number("THRESHOLD", asked, default=THRESHOLD)
    reached = curve.examples_to(threshold)
    if reached is None:
        print(f"{threshold:g} was not reached in {curve.points[-1][0]:,} examples")
    elif reached == curve.points[0][0]:
        print(f"{threshold:g} was reached by the first evaluation, in {reached:,.0f} examples or fewer")
    else:
        print(f"{threshold:g} was reached in about {reached:,.0f} examples")


def _judge(points: Sequence[Comparison], curve: Curve, reference: Curve, *, tolerance: float) -> None:
    print(f"beside {reference.run}")
    for point in points:
        here = "there is no evaluation" if point.value is None else f"{point.value:.4f}"
        mark = "" if point.within(tolerance) else "  outside"
        print(f"{point.examples:>14,}  {here}  reference {point.reference:.4f}{mark}")
    outside = [point for point in points if not point.within(tolerance)]
    if outside:
        raise ToolkitError(
            f"{len(outside)} of {len(points)} points of {curve.run} are not within {tolerance:g} of "
            f"{reference.run}"
        )
    print(f"all {len(points)} points are within {tolerance:g}")


def _number(variable: str, text: str, *, default: float) -> float:
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{variable}={text} is not a number from 0 on")
    return number


if __name__ == "__main__":
    raise SystemExit(run_main(main))
