"""Where a derivative at zero is read off: d/db F(b) = sum of a_k F(b z_k) / b, up to a power of b.

one_sided    O(b)                      (Scellier and Bengio 2017)
symmetric    O(b^2)                    (Laborieux et al. 2021)
four_point   O(b^4)
holomorphic  O(b^N) with N points on a circle in the complex plane (Laborieux and Zenke 2022)
"""

from __future__ import annotations

import cmath
from typing import Literal, NamedTuple, TypeAlias

Nudge: TypeAlias = Literal["one_sided", "symmetric", "four_point", "holomorphic"]


class Point(NamedTuple):
    at: complex  # z
    coefficient: complex  # a


def points(nudge: Nudge, count: int) -> tuple[Point, ...]:
    """The stencil; of a real F the real part of the sum counts. count: N of "holomorphic"."""
    match nudge:
        case "one_sided":
            return Point(1, 1), Point(0, -1)
        case "symmetric":
            return Point(1, 1 / 2), Point(-1, -1 / 2)
        case "four_point":
            return Point(1, 2 / 3), Point(-1, -2 / 3), Point(2, -1 / 12), Point(-2, 1 / 12)
        case "holomorphic":
            return tuple(_on_circle(place, count) for place in range(count // 2 + 1))


def _on_circle(place: int, count: int) -> Point:
    """Those below the real axis are conjugates of those above, which stand for both."""
    if place == 0 or 2 * place == count:
        sign = 1 if place == 0 else -1
        return Point(sign, sign / count)
    at = cmath.exp(2j * cmath.pi * place / count)
    return Point(at, 2 / (at * count))
