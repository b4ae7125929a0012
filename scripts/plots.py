"""make plots: loss, accuracy, learning rate and throughput of a run over optimizer steps."""

from __future__ import annotations

import argparse
import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lib import atomic
from lib.errors import ToolkitError, os_errors, run_main
from lib.reports.series import extremes, series_of
from lib.runs import metrics
from lib.runs.directory import RunDir, resolve_run

Points: TypeAlias = tuple[Sequence[int], Sequence[float]]  # steps and values

_TRAIN_COLOUR, _EVAL_COLOUR = "#2a6f97", "#d1495b"
_INCHES, _DOTS_PER_INCH = (8.0, 4.6), 120
_LOG_ABOVE = 30.0  # a positive column that spans more than this factor gets a logarithmic axis
_SMOOTH_ABOVE = 40  # points
_MAX_DRAWN = 4000  # points of a line: more are no more to see
_AFTER = "exact_after_"  # column prefix in a recursive model's evaluation


class Plot(NamedTuple):
    """One plot: a column of metrics.jsonl, its unit and style."""

    column: str
    label: str
    factor: float = 1.0  # from the unit of the row to that of the label
    smooth: bool = False
    may_be_log: bool = False
    from_zero: bool = False


PLOTS = {
    "loss": Plot("loss", "loss (mean per sample)", smooth=True, may_be_log=True),
    "accuracy": Plot("accuracy", "accuracy (%)", factor=100.0, smooth=True),
    "learning_rate": Plot("learning_rate", "learning rate (per optimizer step)"),
    "throughput": Plot("samples_per_second", "training throughput (samples/s)", smooth=True, from_zero=True),
}


def main() -> int:
    """Write the plots of a run and print their paths."""
    parser = argparse.ArgumentParser(prog="plots", description=__doc__)
    parser.add_argument(
        "run", nargs="?", default="", metavar="RUN", help="path, name or its beginning; newest"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    arguments = parser.parse_args()
    run = resolve_run(arguments.runs, arguments.run)
    rows = (row for batch in metrics.Follower(run.metrics).batches() for row in batch)
    if (first := next(rows, None)) is None:
        raise ToolkitError(f"{run.metrics} has no rows yet")
    for path in write_plots(itertools.chain([first], rows), run.plots, title=_title(run), log=print):
        print(path)
    return 0


def _title(run: RunDir) -> str:
    """Return model, data and run; embedded data are marked as synthetic."""
    data = run.read_json("data")
    try:
        synthetic, name = " (synthetic)" if data["synthetic"] else "", data["name"]
    except KeyError as error:
        raise ToolkitError(
            f"data.json of {run.path} is of another version", why=f"{error} is missing"
        ) from error
    return f"{run.model} on {name}{synthetic}, run {run.name}"


def write_plots(
    rows: Iterable[Mapping[str, Any]], directory: Path, *, title: str, log: Callable[[str], object]
) -> list[Path]:
    """Write directory/{loss,accuracy,learning_rate,throughput}.png and return their paths.

    A plot without data is left out and reported through `log`. A recursive model also gets
    supervision_steps.png: how many samples are solved after how many steps, by the last evaluation.
    Raises ToolkitError if a file cannot be written.
    """
    written, found = [], {(each.kind, each.column): each for each in series_of(rows)}
    epochs = found.get(("train", "epoch"), found.get(("eval", "epoch")))
    epochs_per_step = epochs.values[-1] / epochs.steps[-1] if epochs and epochs.steps[-1] else None
    for name, plot in PLOTS.items():
        series = {
            kind: (each.steps, [value * plot.factor for value in each.values])
            for (kind, column), each in found.items()
            if column == plot.column
        }
        if not series:
            log(f"no {name} plot: no row has a number for {plot.column}")
            continue
        figure = _draw(plot, series, title=title, epochs_per_step=epochs_per_step)
        written.append(_write(directory / f"{name}.png", figure))
    solved = sorted(
        (int(column.removeprefix(_AFTER)), 100.0 * each.values[-1])
        for (kind, column), each in found.items()
        if kind == "eval" and column.startswith(_AFTER)
    )
    if solved:
        figure = _draw_solved(([step for step, _ in solved], [share for _, share in solved]), title=title)
        written.append(_write(directory / "supervision_steps.png", figure))
    return written


def _write(path: Path, figure: Figure) -> Path:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    with os_errors("write a plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(path, data.getvalue())
    return path


def _draw_solved(points: Points, *, title: str) -> Figure:
    figure, axes = _figure(
        title, x="supervision steps of an evaluation", y="samples with every cell right (%)"
    )
    axes.plot(*points, "o-", color=_EVAL_COLOUR, markersize=4, linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0, top=100)
    return figure


def _figure(title: str, *, x: str, y: str) -> tuple[Figure, Axes]:
    """Make an empty figure with labelled axes."""
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps figures and may look for a display
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10, color="#444444")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.8)
    return figure, axes


def _draw(plot: Plot, series: Mapping[str, Points], *, title: str, epochs_per_step: float | None) -> Figure:
    figure, axes = _figure(title, x="optimizer step", y=plot.label)
    if "train" in series:
        _draw_train(axes, series["train"], smooth=plot.smooth)
    if "eval" in series:
        line = _thin(*series["eval"])
        axes.plot(*line, "o-", color=_EVAL_COLOUR, markersize=4, linewidth=1.5, label="evaluation")
    low = min(min(values) for _, values in series.values())
    high = max(max(values) for _, values in series.values())
    if plot.may_be_log and low > 0 and high / low > _LOG_ABOVE:
        axes.set_yscale("log")
    elif plot.from_zero or 0 <= low < 0.5 * high:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if epochs_per_step:
        both_ways = partial(np.multiply, epochs_per_step), partial(np.multiply, 1 / epochs_per_step)
        top = axes.secondary_xaxis("top", functions=both_ways)
        top.set_xlabel("epoch")
    axes.spines["right"].set_visible(False)
    axes.set_axisbelow(True)
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    return figure


def _draw_train(axes: Axes, points: Points, *, smooth: bool) -> None:
    steps, values = points
    if smooth and len(values) > _SMOOTH_ABOVE:
        line, mean = _thin(steps, values), _thin(steps, _smoothed(values))
        axes.plot(*line, color=_TRAIN_COLOUR, linewidth=0.8, alpha=0.3, label="training")
        axes.plot(*mean, color=_TRAIN_COLOUR, linewidth=1.8, label="training, smoothed")
    else:
        marker = "." if len(values) == 1 else ""  # a single point draws no line
        axes.plot(*_thin(steps, values), marker=marker, color=_TRAIN_COLOUR, linewidth=1.5, label="training")


def _smoothed(values: Sequence[float]) -> Sequence[float]:
    """Return the centred running mean over about a thirtieth of the points, narrower at the ends."""
    reach, places = max(len(values) // 60, 1), np.arange(len(values))
    low, high = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[high] - sums[low]) / (high - low)  # type: ignore[no-any-return]


def _thin(steps: Sequence[int], values: Sequence[float]) -> Points:
    """Return all points, or the lowest and the highest of each of _MAX_DRAWN / 2 equal stretches."""
    kept = extremes(values, _MAX_DRAWN)
    return [steps[place] for place in kept], [values[place] for place in kept]


if __name__ == "__main__":
    raise SystemExit(run_main(main))
