"""Plots of the experiments' results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from lib.scaling.pictures import draw_page
from scripts.eqprop.report import Report

_COLOURS = ("#2a6f97", "#d1495b", "#4f772d", "#7f5539", "#5a189a")

Draw = Callable[..., None]  # of axes and report
Rows = Iterable[Mapping[str, Any]]


def pictures_of(report: Report) -> dict[str, Callable[[], bytes]]:
    """Return a function for each plot, by name, that draws it as PNG."""
    draws: dict[str, Sequence[Draw]] = {
        "1": (_errors("float64"), _errors("float32")),
        "2": (_over_steps("loss"), _over_steps("cosine")),
        "ablation": (_over_steps("loss"), _over_steps("rho")),
        "3": (_by_width("over_bptt"), _by_width("peak_mib")),
        "4": (_histogram, _budgets),
        "scaling_laws": (_iterations, _memory),
    }
    page = [partial(draw, report=report) for draw in draws[report.number]]
    title = f"experiment {report.number}, {report.data}"
    return {"picture": lambda: draw_page(page, rows=1, inches=(11.0, 4.6), fontsize=8, title=title)}


def _lines(axes: Axes, rows: Rows, *, x: str, y: str, each: str, marker: str = "o") -> None:
    """Draw a line for each value of the column `each`, through the rows that have x and y."""
    whole = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    for number, name in enumerate(dict.fromkeys(row[each] for row in whole)):
        own = [row for row in whole if row[each] == name]
        points = [row[x] for row in own], [row[y] for row in own]
        axes.plot(*points, marker=marker, markersize=3, color=_COLOURS[number % 5], label=str(name))
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(y.replace("_", " "))


def _errors(dtype: str) -> Draw:
    def draw(axes: Axes, report: Report) -> None:
        rows = [row for row in report.rows if row["dtype"] == dtype and row["block"] == "energy_cross"]
        _lines(axes, rows, x="beta", y="relative_error", each="gradient")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(f"keys from the input, {dtype}", fontsize=9)

    return draw


def _over_steps(column: str) -> Draw:
    def draw(axes: Axes, report: Report) -> None:
        rows = [row for row in report.series if row["seed"] == 1]
        _lines(axes, rows, x="step", y=column, each="way", marker="")
        if column == "loss":
            axes.set_yscale("log")

    return draw


def _by_width(column: str) -> Draw:
    def draw(axes: Axes, report: Report) -> None:
        _lines(axes, report.rows, x="width", y=column, each="gradient")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)

    return draw


def _histogram(axes: Axes, report: Report) -> None:
    for number, way in enumerate(dict.fromkeys(row["way"] for row in report.series)):
        counts = [row["iterations"] for row in report.series if row["way"] == way and "iterations" in row]
        axes.hist(counts, bins=40, histtype="step", color=_COLOURS[number], label=way)
    axes.set_xlabel("iterations of a sample")
    axes.set_ylabel("samples")


def _budgets(axes: Axes, report: Report) -> None:
    _lines(axes, report.series, x="budget", y="accuracy", each="way")
    axes.set_xscale("log")


def _iterations(axes: Axes, report: Report) -> None:
    _lines(axes, report.rows, x="width", y="iterations", each="block")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)


def _memory(axes: Axes, report: Report) -> None:
    _lines(axes, report.series, x="iterations", y="peak_bytes", each="gradient")
    axes.set_xscale("log")
    axes.set_yscale("log")
