"""Plots of a run: loss, accuracy, learning rate and throughput over optimizer steps."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lib import atomic
from lib.errors import os_error

Points: TypeAlias = tuple[list[int], list[float]]  # steps and values

_TRAIN_COLOUR, _EVAL_COLOUR = "#2a6f97", "#d1495b"
_INCHES, _DOTS_PER_INCH = (8.0, 4.6), 120
_LOG_ABOVE = 30.0  # a positive column that spans more than this factor gets a logarithmic axis
_SMOOTH_ABOVE = 40  # points
_AFTER = "exact_after_"  # column prefix in a recursive model's evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot: a column of metrics.jsonl, its unit and style."""

    column: str
    label: str
    factor: float = 1.0  # from the unit of the row to that of the label
    smooth: bool = False
    may_be_log: bool = False
    from_zero: bool = False


PLOTS = {
    "loss": Plot(column="loss", label="loss (mean per sample)", smooth=True, may_be_log=True),
    "accuracy": Plot(column="accuracy", label="accuracy (%)", factor=100.0, smooth=True),
    "learning_rate": Plot(column="learning_rate", label="learning rate (per optimizer step)"),
    "throughput": Plot(
        column="samples_per_second", label="training throughput (samples/s)", smooth=True, from_zero=True
    ),
}


def write_plots(
    rows: Sequence[Mapping[str, Any]], directory: Path, *, title: str, say: Callable[[str], object]
) -> list[Path]:
    """Write directory/{loss,accuracy,learning_rate,throughput}.png and return their paths.

    A plot without data is left out and reported through `say`. A recursive model also gets
    supervision_steps.png: how many samples are solved after how many steps, by the last evaluation.
    Raises ToolkitError if a file cannot be written.
    """
    written = []
    for name, plot in PLOTS.items():
        series = {kind: points for kind in ("train", "eval") if (points := _points(rows, kind, plot))[0]}
        if not series:
            say(f"no {name} plot: no row has a number for {plot.column}")
            continue
        data = _draw(plot, series, title=title, epochs_per_step=_epochs_per_step(rows))
        written.append(_written(directory / f"{name}.png", data))
    solved = _solved_after(rows)
    if solved[0]:
        written.append(_written(directory / "supervision_steps.png", _draw_solved(solved, title=title)))
    return written


def _written(path: Path, data: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(path, data)
    except OSError as error:
        raise os_error("write a plot", error) from error
    return path


def _solved_after(rows: Iterable[Mapping[str, Any]]) -> Points:
    """Supervision steps, and the share of samples (%) that the last evaluation found solved after each."""
    last: Mapping[str, Any] = {}
    for row in rows:
        if row.get("kind") == "eval":
            last = row
    steps = sorted(int(name.removeprefix(_AFTER)) for name in last if name.startswith(_AFTER))
    return steps, [100.0 * last[f"{_AFTER}{step}"] for step in steps]


def _draw_solved(points: Points, *, title: str) -> bytes:
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*points, "o-", color=_EVAL_COLOUR, markersize=4, linewidth=1.5)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0, top=100)
    axes.set_xlabel("supervision steps of an evaluation")
    axes.set_ylabel("samples with every cell right (%)")
    axes.set_title(title, fontsize=10, color="#444444")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.8)
    return _png(figure)


def _points(rows: Iterable[Mapping[str, Any]], kind: str, plot: Plot) -> Points:
    found = [
        (row["step"], row[plot.column] * plot.factor)
        for row in rows
        if row.get("kind") == kind and "step" in row and row.get(plot.column) is not None
    ]
    return [step for step, _ in found], [value for _, value in found]


def _epochs_per_step(rows: Iterable[Mapping[str, Any]]) -> float | None:
    ratios = [row["epoch"] / row["step"] for row in rows if row.get("epoch") and row.get("step")]
    return ratios[-1] if ratios else None


def _draw(plot: Plot, series: Mapping[str, Points], *, title: str, epochs_per_step: float | None) -> bytes:
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps figures and may look for a display
    axes = figure.add_subplot()
    if "train" in series:
        _draw_train(axes, series["train"], smooth=plot.smooth)
    if "eval" in series:
        axes.plot(*series["eval"], "o-", color=_EVAL_COLOUR, markersize=4, linewidth=1.5, label="evaluation")
    _scale(axes, [value for _, values in series.values() for value in values], plot)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(plot.label)
    axes.set_title(title, fontsize=10, color="#444444")
    if epochs_per_step:
        top = axes.secondary_xaxis("top", functions=_scaling(epochs_per_step))
        top.set_xlabel("epoch")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines["right"].set_visible(False)
    axes.set_axisbelow(True)
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _scaling(ratio: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the functions that multiply and divide numbers or arrays by `ratio`."""
    return lambda x: x * ratio, lambda x: x / ratio


def _draw_train(axes: Axes, points: Points, *, smooth: bool) -> None:
    steps, values = points
    if smooth and len(values) > _SMOOTH_ABOVE:
        axes.plot(steps, values, color=_TRAIN_COLOUR, linewidth=0.8, alpha=0.3, label="training")
        axes.plot(steps, _smoothed(values), color=_TRAIN_COLOUR, linewidth=1.8, label="training, smoothed")
    else:
        marker = "." if len(values) == 1 else ""  # a single point draws no line
        axes.plot(steps, values, marker=marker, color=_TRAIN_COLOUR, linewidth=1.5, label="training")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Centred running mean over about a thirtieth of the points, narrower at the ends."""
    reach = max(len(values) // 60, 1)
    windows = [values[max(i - reach, 0) : i + reach + 1] for i in range(len(values))]
    return [math.fsum(window) / len(window) for window in windows]


def _scale(axes: Axes, values: Sequence[float], plot: Plot) -> None:
    if plot.may_be_log and min(values) > 0 and max(values) / min(values) > _LOG_ABOVE:
        axes.set_yscale("log")
    elif plot.from_zero or 0 <= min(values) < 0.5 * max(values):
        axes.set_ylim(bottom=0)
