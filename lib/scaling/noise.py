"""Seed noise of the loss, and the smallest difference between models that exceeds it.

A standard deviation estimated from a few seeds is itself uncertain (with three, one sweep in twenty has less
than a quarter of the true one), which Student's t accounts for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lib.scaling.laws import Point

CHANCE = 0.05  # significance level for all comparisons of one sweep together
NEAR = 1.1  # sizes within this factor are compared as one: noise exceeds their difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviation of the loss over seeds, and its degrees of freedom."""

    deviation: float
    freedom: int

    def limit(self, chance: float) -> float:
        """Return the upper limit that the noise of one run exceeds with probability `chance`."""
        low, high = 0.0, 1.0
        while _within(high, self.freedom) < 1 - 2 * chance:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _within(middle, self.freedom) < 1 - 2 * chance else (low, middle)
        return self.deviation * high


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Models of (nearly) one size on one amount of data: their mean loss and number."""

    parameters: float
    loss: float
    runs: int


def seed_noise(points: Sequence[Point]) -> Noise | None:
    """Return the noise pooled over cells of equal size and data; None if no cell has two seeds."""
    cells: dict[tuple[float, float], list[float]] = defaultdict(list)
    for point in points:
        cells[point.parameters, point.tokens].append(point.loss)
    freedom = sum(len(losses) - 1 for losses in cells.values())
    if not freedom:
        return None
    squares = sum(float(np.var(losses)) * len(losses) for losses in cells.values())
    return Noise(deviation=math.sqrt(squares / freedom), freedom=freedom)


def sizes_by_tokens(points: Sequence[Point]) -> dict[float, list[Size]]:
    """Group points by amount of data, then by size in ascending order; near sizes are one group."""
    rows: dict[float, list[Size]] = {}
    for tokens in sorted({point.tokens for point in points}):
        groups: list[list[Point]] = []
        for point in sorted((p for p in points if p.tokens == tokens), key=lambda p: p.parameters):
            if groups and point.parameters <= NEAR * groups[-1][0].parameters:
                groups[-1].append(point)
            else:
                groups.append([point])
        rows[tokens] = [
            Size(
                parameters=float(np.mean([point.parameters for point in group])),
                loss=float(np.mean([point.loss for point in group])),
                runs=len(group),
            )
            for group in groups
        ]
    return rows


def significant_difference(one: Size, other: Size, noise: Noise | None, *, chance: float) -> float:
    """Return the loss difference that noise alone exceeds with probability `chance`; 0 if it is unknown."""
    return noise.limit(chance) * math.sqrt(1 / one.runs + 1 / other.runs) if noise else 0.0


def _within(t: float, freedom: int) -> float:
    """P(-t < T < t) for Student's t as a finite sum (Abramowitz and Stegun, 26.7.3, 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(0, freedom - odd, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1 + odd) / (k + 2 + odd)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
