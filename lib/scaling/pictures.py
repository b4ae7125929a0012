"""Plots of a sweep: four of loss and time by size, and three diagnostics."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lib import atomic
from lib.scaling.isoflop import isoflops
from lib.scaling.judge import FittedLaw, Verdict
from lib.scaling.laws import interval, log_residuals
from lib.scaling.results import ScalingResults, points_of

_DOTS_PER_INCH = 110
_COLOURS = ("#2a6f97", "#d1495b", "#4f772d")
_BAND_LEVEL = 0.95

Groups = Mapping[str, Sequence[ScalingResults]]
Draw = Callable[[Axes], None]


def write_pictures(
    groups: Groups, verdicts: Mapping[str, Verdict], lines: Mapping[str, float], out: Path
) -> list[Path]:
    """Write out/scaling_laws.png and scaling_laws_2.png, and return their paths. Raises ToolkitError."""
    first: list[Draw] = [
        lambda axes: _by_size(axes, groups, verdicts, lines),
        lambda axes: _by_shape(axes, groups, across="d_model", each="n_layers"),
        lambda axes: _by_shape(axes, groups, across="n_layers", each="d_model"),
        lambda axes: _by_time(axes, groups),
    ]
    second: list[Draw] = [
        lambda axes: _isoflop(axes, groups, verdicts),
        lambda axes: _frontier(axes, groups, verdicts),
        lambda axes: _residuals(axes, groups, verdicts),
    ]
    paths = [out / "scaling_laws.png", out / "scaling_laws_2.png"]
    for path, draws in zip(paths, (first, second), strict=True):
        page = draw_page(draws, rows=2, inches=(11.0, 8.0), fontsize=7)
        atomic.save(path, page, action="write a plot")
    return paths


def draw_page(
    draws: Sequence[Draw], *, rows: int, inches: tuple[float, float], fontsize: int, title: str = ""
) -> bytes:
    """Draw several plots on one page, and return it as PNG."""
    figure = Figure(figsize=inches, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which keeps figures and may look for a display
    for number, draw in enumerate(draws, start=1):
        axes = figure.add_subplot(rows, -(-len(draws) // rows), number)
        draw(axes)
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=fontsize)
    if title:
        figure.suptitle(title, fontsize=10, color="#444444")
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return data.getvalue()


def _by_size(axes: Axes, groups: Groups, verdicts: Mapping[str, Verdict], lines: Mapping[str, float]) -> None:
    for colour, (arch, results) in zip(_COLOURS, groups.items(), strict=False):
        most = _at_most_data(results)
        sizes = [result.num_params_nonembedding for result in most]
        held = verdicts[arch].fits["power"].holdout
        for size, result in zip(sizes, most, strict=True):
            face = "none" if held and 6 * size * result.tokens >= held.flops else colour
            axes.plot(size, math.exp(result.val_nats), "o", color=colour, mfc=face, markersize=5)
        axes.plot([], [], "o", color=colour, markersize=5, label=f"{arch} (hollow: held out)")
        _band(axes, verdicts[arch].fits["power"], sizes, most[0].tokens, colour)
    for name, nats in lines.items():
        axes.axhline(math.exp(nats), linewidth=0.8, linestyle=":", color="#888888")
        axes.annotate(name, (1.0, math.exp(nats)), xycoords=("axes fraction", "data"), fontsize=6, ha="right")
    axes.set(xscale="log", yscale="log", xlabel="parameters without embeddings", ylabel="perplexity")
    axes.set_title("Perplexity by size, at the most data", fontsize=9)


def _band(axes: Axes, fitted: FittedLaw, sizes: Sequence[float], tokens: float, colour: str) -> None:
    """Draw the law as perplexity with its bootstrap band, dashed if the law is refused."""
    if fitted.law is None or not fitted.samples or min(sizes) == max(sizes):
        return
    across = np.geomspace(min(sizes), max(sizes), 40)
    line = [math.exp(fitted.law.loss(parameters=size, tokens=tokens)) for size in across]
    drawn = [[law.loss(parameters=size, tokens=tokens) for law in fitted.samples] for size in across]
    style = "--" if fitted.reasons else "-"
    axes.plot(across, line, style, color=colour, linewidth=1.2)
    low, high = np.exp([interval(losses, level=_BAND_LEVEL) for losses in drawn]).T
    axes.fill_between(across, low, high, color=colour, alpha=0.15)


def _by_shape(axes: Axes, groups: Groups, *, across: str, each: str) -> None:
    for arch, results in groups.items():
        most = [result for result in _at_most_data(results) if result.seed == results[0].seed]
        for fixed in sorted({getattr(result, each) for result in most}):
            own = [result for result in most if getattr(result, each) == fixed]
            row = sorted((getattr(result, across), math.exp(result.val_nats)) for result in own)
            axes.plot(*zip(*row, strict=True), "o-", markersize=4, label=f"{arch}, {each} {fixed}")
    axes.set(xlabel=across, ylabel="perplexity")
    axes.set_title(f"Perplexity by {across}", fontsize=9)


def _by_time(axes: Axes, groups: Groups) -> None:
    for colour, (arch, results) in zip(_COLOURS, groups.items(), strict=False):
        most = _at_most_data(results)
        row = [(result.num_params_nonembedding, result.training_time) for result in most]
        axes.plot(*zip(*row, strict=True), "o", color=colour, markersize=4, label=arch)
    axes.set(xscale="log", yscale="log", xlabel="parameters without embeddings", ylabel="training time (s)")
    axes.set_title("Training time by size", fontsize=9)


def _isoflop(axes: Axes, groups: Groups, verdicts: Mapping[str, Verdict]) -> None:
    """Draw losses at equal budgets; an optimum is marked only if it is robust to seed noise."""
    for arch, results in groups.items():
        stands = verdicts[arch].growth.exponent is not None
        for budget in isoflops(points_of(results)):
            (line,) = axes.plot(budget.sizes, budget.losses, "o-", markersize=3, label=f"{budget.flops:.1e}")
            if stands and budget.optimum is not None:
                axes.axvline(budget.optimum, color=line.get_color(), linewidth=0.7, linestyle=":")
    axes.set(xscale="log", xlabel="parameters without embeddings", ylabel="loss (nats)")
    axes.set_title("Equal budgets of 6 N D operations; dotted: optimum, where noise leaves one", fontsize=9)


def _frontier(axes: Axes, groups: Groups, verdicts: Mapping[str, Verdict]) -> None:
    """Draw every run, and the optimal size that the law gives for each budget."""
    for colour, (arch, results) in zip(_COLOURS, groups.items(), strict=False):
        costs = [6 * result.num_params_nonembedding * result.tokens for result in results]
        axes.plot(costs, [result.val_nats for result in results], "o", color=colour, markersize=3, label=arch)
        fitted = verdicts[arch].fits["chinchilla"]
        if fitted.law is None or fitted.reasons or verdicts[arch].growth.exponent is None:
            continue
        across = np.geomspace(min(costs), max(costs), 40)
        sizes = [fitted.law.optimal_parameters(cost) for cost in across]
        best = [
            fitted.law.loss(parameters=size, tokens=cost / 6 / size)
            for size, cost in zip(sizes, across, strict=True)
        ]
        axes.plot(across, best, "-", color=colour, linewidth=1.2, label=f"{arch}: optimal size")
    axes.set(xscale="log", xlabel="6 N D", ylabel="loss (nats)")
    axes.set_title("Loss by cost; a line only where the law and its optimum stand", fontsize=9)


def _residuals(axes: Axes, groups: Groups, verdicts: Mapping[str, Verdict]) -> None:
    for colour, (arch, results) in zip(_COLOURS, groups.items(), strict=False):
        law = verdicts[arch].fits["chinchilla"].law
        if law is not None:
            sizes = [result.num_params_nonembedding for result in results]
            rest = log_residuals(points_of(results), law)
            axes.plot(sizes, rest, "o", color=colour, markersize=4, label=arch)
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set(xscale="log", xlabel="parameters without embeddings", ylabel="log of loss over law")
    axes.set_title("What L = E + A N^-alpha + B D^-beta leaves", fontsize=9)


def _at_most_data(results: Sequence[ScalingResults]) -> list[ScalingResults]:
    most = max(result.tokens for result in results)
    return [result for result in results if result.tokens == most]
