"""The size of least loss at a given cost: a parabola over log size for each budget (Hoffmann et al. 2022).

Sweeps train on a few amounts of data; the loss at the amount that a budget leaves for a size is read off
between those, on a line in logarithms, and never beyond them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lib.scaling.laws import Point, interval
from lib.scaling.noise import Noise

BUDGETS, FEWEST_SIZES, FEWEST_OPTIMA = 5, 3, 3
NOISE_DRAWS, NOISE_LEVEL = 200, 0.95
NO_SEEDS = "no cell has several seeds"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsoFlop:
    """One budget of 6 N D operations. optimum: the size of least loss; None, and why, where there is none."""

    flops: float
    sizes: tuple[float, ...]
    losses: tuple[float, ...]
    optimum: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """a of optimum = constant x flops^a, with what noise makes of it; None, and why, where there is none."""

    exponent: float | None = None
    interval: tuple[float, float] | None = None
    reason: str = ""


def isoflops(points: Sequence[Point]) -> list[IsoFlop]:
    """Budgets at which at least three sizes can be read off, from low to high."""
    curves: dict[float, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        curves[point.parameters][point.tokens].append(point.loss)
    return [
        _parabola(flops, [(size, _read(curves[size], flops / (6 * size))) for size in sizes])
        for flops, sizes in covered(points)
    ]


def covered(points: Sequence[Point]) -> list[tuple[float, list[float]]]:
    """Those budgets, each with the sizes to be read off, whatever the losses are."""
    amounts: dict[float, set[float]] = defaultdict(set)
    for point in points:
        amounts[point.parameters].add(point.tokens)
    ranges = {size: (min(own), max(own)) for size, own in sorted(amounts.items())}
    spans = [6 * size * np.array(ends) for size, ends in ranges.items() if ends[0] < ends[1]]
    if len(spans) < FEWEST_SIZES:
        return []
    low, high = sorted(span[0] for span in spans), sorted(span[1] for span in spans)
    least, most = low[FEWEST_SIZES - 1], high[-FEWEST_SIZES]
    if least >= most:
        return []
    found = []
    for flops in np.geomspace(least, most, BUDGETS):
        sizes = [
            size
            for size, (fewest, largest) in ranges.items()
            if fewest * 0.999 <= flops / (6 * size) <= largest * 1.001
        ]
        if len(sizes) >= FEWEST_SIZES:
            found.append((float(flops), sizes))
    return found


def uncovered(points: Sequence[Point]) -> str:
    """Why no exponent can follow, whatever the losses are; empty where one may."""
    if (found := len(covered(points))) >= FEWEST_OPTIMA:
        return ""
    return (
        f"{found} budgets of equal operations can be read off at {FEWEST_SIZES} sizes, "
        f"and {FEWEST_OPTIMA} are needed"
    )


def exponent(budgets: Sequence[IsoFlop]) -> float | None:
    """a of optimum = constant x flops^a; None with fewer than three optima."""
    optima = [(budget.flops, budget.optimum) for budget in budgets if budget.optimum is not None]
    if len(optima) < FEWEST_OPTIMA:
        return None
    logs = np.log(np.asarray(optima))
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def growth(points: Sequence[Point], noise: Noise | None) -> Growth:
    """The exponent, if it outlives the noise: losses drawn anew (Porian et al. 2024)."""
    budgets = isoflops(points)
    measured = exponent(budgets)
    if measured is None:
        return Growth(reason=uncovered(points) or _border(budgets))
    if noise is None:
        return Growth(reason=NO_SEEDS)
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(NOISE_DRAWS):
        # The spread of few seeds may be less than the noise is: each draw has one that it may come from.
        spread = noise.deviation * np.sqrt(noise.freedom / random.chisquare(noise.freedom))
        changes = spread * random.standard_normal(len(points))
        noisy = [replace(point, loss=point.loss + by) for point, by in zip(points, changes, strict=True)]
        if (found := exponent(isoflops(noisy))) is not None:
            drawn.append(found)
    if (kept := len(drawn) / NOISE_DRAWS) < NOISE_LEVEL:
        return Growth(reason=f"optima stay inside the grid in {kept:.0%} of draws of the noise of seeds")
    return Growth(exponent=measured, interval=interval(drawn, level=NOISE_LEVEL))


def _border(budgets: Sequence[IsoFlop]) -> str:
    """The optimal size must be seen, not extrapolated to."""
    found = sum(budget.optimum is not None for budget in budgets)
    reasons = sorted({budget.reason for budget in budgets if budget.reason})
    return f"only {found} budgets have their best size inside the grid ({'; '.join(reasons)})"


def _read(curve: dict[float, list[float]], tokens: float) -> float:
    amounts = sorted(curve)
    losses = [np.log(np.mean(curve[amount])) for amount in amounts]
    return float(np.exp(np.interp(np.log(tokens), np.log(amounts), losses)))


def _parabola(flops: float, there: list[tuple[float, float]]) -> IsoFlop:
    sizes, losses = zip(*there, strict=True)
    log_sizes = np.log(sizes)
    curvature, slope, _ = np.polyfit(log_sizes - log_sizes.mean(), losses, 2)
    optimum, reason = None, "the losses do not curve upwards"
    if curvature > 0:
        lowest = log_sizes.mean() - slope / (2 * curvature)
        if log_sizes[0] < lowest < log_sizes[-1]:
            optimum, reason = float(np.exp(lowest)), ""
        else:
            reason = f"the least loss is at the {'smallest' if lowest <= log_sizes[0] else 'largest'} size"
    return IsoFlop(flops=flops, sizes=sizes, losses=losses, optimum=optimum, reason=reason)
