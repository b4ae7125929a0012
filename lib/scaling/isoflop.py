"""Compute-optimal model sizes: a parabola over log size for each FLOP budget (Hoffmann et al. 2022).

Sweeps train on a few amounts of data; the loss at the amount that a budget leaves for a size is interpolated
linearly in logarithms, never extrapolated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.scaling.laws import Floats, Point, interval
from lib.scaling.noise import Noise

BUDGETS, MIN_SIZES, MIN_OPTIMA = 5, 3, 3
NOISE_DRAWS, NOISE_LEVEL = 200, 0.95
NO_SEEDS = "no cell has several seeds"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsoFlop:
    """One budget of 6 N D FLOPs.

    optimum: the size of lowest loss; None, with the reason, if there is none.
    """

    flops: float
    sizes: tuple[float, ...]
    losses: tuple[float, ...]
    optimum: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """a in optimal size = constant * FLOPs^a with its interval; None, with the reason, if there is none."""

    exponent: float | None = None
    interval: tuple[float, float] | None = None
    reason: str = ""


def isoflops(points: Sequence[Point]) -> list[IsoFlop]:
    """Return the budgets at which at least three sizes can be interpolated, in ascending order."""
    curves: dict[float, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        curves[point.parameters][point.tokens].append(point.loss)
    logs = {size: _log_curve(curve) for size, curve in curves.items()}
    return [
        _parabola(flops, sizes, [_interpolate(*logs[size], flops / (6 * size)) for size in sizes])
        for flops, sizes in shared_budgets(points)
    ]


def shared_budgets(points: Sequence[Point]) -> list[tuple[float, list[float]]]:
    """Return those budgets with the sizes that can be interpolated, independent of the losses."""
    amounts: dict[float, set[float]] = defaultdict(set)
    for point in points:
        amounts[point.parameters].add(point.tokens)
    ranges = {size: (min(own), max(own)) for size, own in sorted(amounts.items())}
    spans = [6 * size * np.array(ends) for size, ends in ranges.items() if ends[0] < ends[1]]
    if len(spans) < MIN_SIZES:
        return []
    low, high = sorted(span[0] for span in spans), sorted(span[1] for span in spans)
    smallest, largest = low[MIN_SIZES - 1], high[-MIN_SIZES]
    if smallest >= largest:
        return []
    budgets = []
    for flops in np.geomspace(smallest, largest, BUDGETS):
        sizes = [
            size
            for size, (fewest, most) in ranges.items()
            if fewest * 0.999 <= flops / (6 * size) <= most * 1.001
        ]
        if len(sizes) >= MIN_SIZES:
            budgets.append((float(flops), sizes))
    return budgets


def budget_shortfall(points: Sequence[Point]) -> str:
    """Return the reason why no exponent can follow, independent of the losses; empty if one may."""
    if (found := len(shared_budgets(points))) >= MIN_OPTIMA:
        return ""
    return (
        f"{found} budgets of equal operations can be interpolated at {MIN_SIZES} sizes, "
        f"and {MIN_OPTIMA} are needed"
    )


def exponent(budgets: Sequence[IsoFlop]) -> float | None:
    """Return a of optimal size = constant * FLOPs^a; None with fewer than three optima."""
    optima = [(budget.flops, budget.optimum) for budget in budgets if budget.optimum is not None]
    if len(optima) < MIN_OPTIMA:
        return None
    logs = np.log(np.asarray(optima))
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def growth(points: Sequence[Point], noise: Noise | None) -> Growth:
    """Return the exponent if it is robust to redrawn seed noise (Porian et al. 2024)."""
    budgets = isoflops(points)
    measured = exponent(budgets)
    if measured is None:
        optima = sum(budget.optimum is not None for budget in budgets)
        reasons = "; ".join(sorted({budget.reason for budget in budgets if budget.reason}))
        few = f"only {optima} budgets have their best size inside the grid ({reasons})"
        return Growth(reason=budget_shortfall(points) or few)
    if noise is None:
        return Growth(reason=NO_SEEDS)
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(NOISE_DRAWS):
        # The deviation is uncertain with few seeds, so each draw has its own.
        spread = noise.deviation * np.sqrt(noise.freedom / random.chisquare(noise.freedom))
        changes = spread * random.standard_normal(len(points))
        noisy = [replace(point, loss=point.loss + by) for point, by in zip(points, changes, strict=True)]
        if (found := exponent(isoflops(noisy))) is not None:
            drawn.append(found)
    if (kept := len(drawn) / NOISE_DRAWS) < NOISE_LEVEL:
        return Growth(reason=f"optima stay inside the grid in {kept:.0%} of draws of the seed noise")
    return Growth(exponent=measured, interval=interval(drawn, level=NOISE_LEVEL))


def _log_curve(curve: dict[float, list[float]]) -> tuple[Floats, Floats]:
    """Return the logarithms of the amounts in ascending order, and of the mean loss at each."""
    amounts = sorted(curve)
    return np.log(amounts), np.log([sum(curve[amount]) / len(curve[amount]) for amount in amounts])


def _interpolate(log_amounts: Floats, log_losses: Floats, tokens: float) -> float:
    return float(np.exp(np.interp(np.log(tokens), log_amounts, log_losses)))


def _parabola(flops: float, sizes: Sequence[float], losses: Sequence[float]) -> IsoFlop:
    log_sizes = np.log(sizes)
    curvature, slope, _ = np.polyfit(log_sizes - log_sizes.mean(), losses, 2)
    optimum, reason = None, "the losses do not curve upwards"
    if curvature > 0:
        lowest = log_sizes.mean() - slope / (2 * curvature)
        if log_sizes[0] < lowest < log_sizes[-1]:
            optimum, reason = float(np.exp(lowest)), ""
        else:
            reason = f"the lowest loss is at the {'smallest' if lowest <= log_sizes[0] else 'largest'} size"
    return IsoFlop(flops=flops, sizes=tuple(sizes), losses=tuple(losses), optimum=optimum, reason=reason)
