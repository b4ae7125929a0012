"""What seeds tell of noise, and which difference between models is more than that.

A spread that a few seeds give is itself uncertain: with three, one sweep in twenty has less than a quarter of
the true one. Student's t allows for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lib.scaling.laws import Point

CHANCE = 0.05  # that noise alone is told as more than noise, in one sweep
NEAR = 1.1  # sizes within that factor are one size: noise is larger than what tells them apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviation of the loss over seeds, and the degrees of freedom that it is known with."""

    deviation: float
    freedom: int

    def limit(self, chance: float) -> float:
        """What noise of one run exceeds upwards with that chance."""
        low, high = 0.0, 1.0
        while _within(high, self.freedom) < 1 - 2 * chance:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _within(middle, self.freedom) < 1 - 2 * chance else (low, middle)
        return self.deviation * high


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Models of one size, or nearly, on one amount of data: their mean loss, and how many they are."""

    parameters: float
    loss: float
    runs: int


def seed_noise(points: Sequence[Point]) -> Noise | None:
    """Pooled over cells of equal size and data; None where no cell has two seeds."""
    cells: dict[tuple[float, float], list[float]] = defaultdict(list)
    for point in points:
        cells[point.parameters, point.tokens].append(point.loss)
    freedom = sum(len(losses) - 1 for losses in cells.values())
    if not freedom:
        return None
    squares = sum(float(np.var(losses)) * len(losses) for losses in cells.values())
    return Noise(deviation=math.sqrt(squares / freedom), freedom=freedom)


def rows(points: Sequence[Point]) -> dict[float, list[Size]]:
    """By amount of data, from the smallest size to the largest; near ones are together."""
    found: dict[float, list[Size]] = {}
    for tokens in sorted({point.tokens for point in points}):
        groups: list[list[Point]] = []
        for point in sorted((p for p in points if p.tokens == tokens), key=lambda p: p.parameters):
            if groups and point.parameters <= NEAR * groups[-1][0].parameters:
                groups[-1].append(point)
            else:
                groups.append([point])
        found[tokens] = [
            Size(
                parameters=float(np.mean([point.parameters for point in group])),
                loss=float(np.mean([point.loss for point in group])),
                runs=len(group),
            )
            for group in groups
        ]
    return found


def least_difference(one: Size, other: Size, noise: Noise | None, *, chance: float) -> float:
    """Noise alone makes the one worse than the other by more with that chance; 0 where it is not known."""
    if noise is None:
        return 0.0
    return noise.limit(chance) * math.sqrt(1 / one.runs + 1 / other.runs)


def _within(t: float, freedom: int) -> float:
    """Chance that Student's t is between -t and t: a finite sum (Abramowitz and Stegun, 26.7.3, 26.7.4)."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(0, freedom - odd, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k + 1 + odd) / (k + 2 + odd)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
