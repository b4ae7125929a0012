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
from lib.sweeps.verdict import t_quantile

CHANCE = 0.05  # significance level for all comparisons of one sweep together
NEAR = 1.1  # sizes within this factor are compared as one: noise exceeds their difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviation of the loss over seeds, and its degrees of freedom."""

    deviation: float
    freedom: int

    def limit(self, chance: float) -> float:
        """Return the upper limit that the noise of one run exceeds with probability `chance`."""
        return self.deviation * t_quantile(1 - chance, self.freedom)


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
