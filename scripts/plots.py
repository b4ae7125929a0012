"""make plots: loss, accuracy, learning rate and throughput of a run over optimizer steps."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lib import atomic
from lib.errors import ToolkitError, run_main
from lib.reports.series import Series, extremes, series_of
from lib.runs import metrics
from lib.runs.directory import resolve_run
from lib.runs.index import stored
from lib.scaling.pictures import Draw, draw_page

Values = npt.NDArray[np.float64]

_COLOURS = {"train": "#2a6f97", "eval": "#d1495b"}
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
    parser.add_argument("run", nargs="?", default="", help="path, name or its beginning; newest")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where the runs are")
    arguments = parser.parse_args()
    run = resolve_run(arguments.runs, arguments.run)
    name, synthetic = stored(run, "data", lambda data: (data["name"], data["synthetic"]))
    if not (series := series_of(metrics.rows(run.metrics))):
        raise ToolkitError(f"{run.metrics} has no rows yet")
    title = f"{run.model} on {name}{' (synthetic)' * synthetic}, run {run.name}"
    for path in write_plots(series, run.plots, title=title, log=print):
        print(path)
    return 0


def write_plots(
    series: Sequence[Series], directory: Path, *, title: str, log: Callable[[str], object]
) -> list[Path]:
    """Write directory/{loss,accuracy,learning_rate,throughput}.png and return their paths.

    A plot without data is left out and reported through `log`. A recursive model also gets
    supervision_steps.png: how many samples are solved after how many steps, by the last evaluation.
    Raises ToolkitError if a file cannot be written.
    """
    written = []
    epochs = next((each for each in series if each.column == "epoch" and each.steps[-1]), None)
    epochs_per_step = epochs.values[-1] / epochs.steps[-1] if epochs else None
    for name, plot in PLOTS.items():
        if own := {each.kind: each for each in series if each.column == plot.column}:
            draw = partial(_draw, plot=plot, series=own, epochs_per_step=epochs_per_step)
            written.append(_write(directory / f"{name}.png", draw, title))
        else:
            log(f"no {name} plot: no row has a number for {plot.column}")
    evaluated = {each.column: each.values[-1] for each in series if each.kind == "eval"}
    solved = {int(name.removeprefix(_AFTER)): x for name, x in evaluated.items() if name.startswith(_AFTER)}
    if solved:
        draw = partial(_draw_solved, solved=sorted(solved.items()))
        written.append(_write(directory / "supervision_steps.png", draw, title))
    return written


def _write(path: Path, draw: Draw, title: str) -> Path:
    data = draw_page([draw], rows=1, inches=(8.8, 5.0), fontsize=9, title=title)
    atomic.save(path, data, action="write a plot")
    return path


def _draw_solved(axes: Axes, solved: Sequence[tuple[int, float]]) -> None:
    steps, shares = np.array(solved).T
    axes.plot(steps, 100 * shares, "o-", color=_COLOURS["eval"], markersize=4, linewidth=1.5)
    axes.set(xlabel="supervision steps of an evaluation", ylabel="samples with every cell right (%)")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0, top=100)


def _draw(axes: Axes, plot: Plot, series: dict[str, Series], epochs_per_step: float | None) -> None:
    axes.set(xlabel="optimizer step", ylabel=plot.label)
    values = {kind: plot.factor * np.array(each.values) for kind, each in series.items()}
    if "train" in series:
        draw, own = partial(_draw_line, axes, series["train"].steps), values["train"]
        if plot.smooth and len(own) > _SMOOTH_ABOVE:
            draw(own, linewidth=0.8, alpha=0.3, label="training")
            draw(_smoothed(own), linewidth=1.8, label="training, smoothed")
        else:
            draw(own, marker="." * (len(own) == 1), label="training")  # a single point draws no line
    if "eval" in series:
        style = {"marker": "o", "markersize": 4, "color": _COLOURS["eval"]}
        _draw_line(axes, series["eval"].steps, values["eval"], label="evaluation", **style)
    low, high = (choose(map(choose, values.values())) for choose in (min, max))
    if plot.may_be_log and low > 0 and high / low > _LOG_ABOVE:
        axes.set_yscale("log")
    elif plot.from_zero or 0 <= low < 0.5 * high:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if epochs_per_step:
        both_ways = partial(np.multiply, epochs_per_step), partial(np.multiply, 1 / epochs_per_step)
        axes.secondary_xaxis("top", functions=both_ways).set_xlabel("epoch")
    axes.spines["right"].set_visible(False)


def _draw_line(axes: Axes, steps: Sequence[int], values: Values, **style: Any) -> None:
    """Draw at most _MAX_DRAWN points."""
    kept = extremes(values.tolist(), _MAX_DRAWN)
    axes.plot(np.array(steps)[kept], values[kept], **{"color": _COLOURS["train"], "linewidth": 1.5, **style})


def _smoothed(values: Values) -> Values:
    """Return the centred running mean over about a thirtieth of the points, narrower at the ends."""
    reach, places = max(len(values) // 60, 1), np.arange(len(values))
    low, high = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray((sums[high] - sums[low]) / (high - low))


if __name__ == "__main__":
    raise SystemExit(run_main(main))
