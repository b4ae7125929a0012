"""What a sweep can claim: fits with their doubt, a prediction of what was withheld, or a refusal.

A fit that looks good says nothing: every claim here is tested on the largest models, which it has not seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from lib.scaling.isoflop import NO_SEEDS, Growth, exponent, growth, isoflops, uncovered
from lib.scaling.laws import (
    BOOTSTRAPS,
    STARTS,
    Law,
    LawName,
    Point,
    bootstrap,
    fit,
    interval,
    intervals,
)

FEWEST_POINTS, FEWEST_SIZES, FEWEST_AMOUNTS = 12, 3, 3
LEVELS = (0.8, 0.95)
HELD_OUT_LEVEL = 0.9
_ROUNDING = 1e-6  # what it makes of nothing is smaller
LAWS: tuple[LawName, ...] = get_args(LawName)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """How well a law predicts the largest size, which it was fitted without.

    error: mean absolute error of the log of the loss. covered: share of the points in the 90 % band.
    explained: share in that band made wider by twice the spread of seeds; None where that is not known.
    """

    size: float
    points: int
    error: float
    bias: float
    covered: float
    explained: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A law, and all that is to be said with it. status: "ok", or "insufficient" for `reasons`."""

    law: Law | None
    samples: tuple[Law, ...] = ()
    held_out: HeldOut | None = None
    reasons: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        return "insufficient" if self.reasons else "ok"

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"status": self.status, "reasons": list(self.reasons)}
        if self.law is not None:
            content |= dataclasses.asdict(self.law)
        if self.samples:
            content["ci"] = {
                f"{level:.0%}": {
                    name: list(ends) for name, ends in intervals(self.samples, level=level).items()
                }
                for level in LEVELS
            }
        content["holdout"] = dataclasses.asdict(self.held_out) if self.held_out else None
        return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one architecture.

    effect: loss of the smallest size minus that of the largest, at the most data. rise: where, at the most
    data, a larger model is worse by more than seeds explain; empty where none is. spread: standard deviation
    over seeds; None without repeated seeds. growth: of the best size with the budget.
    """

    fits: dict[LawName, Fitted]
    effect: float
    rise: str
    spread: float | None
    growth: Growth
    warnings: tuple[str, ...] = field(default=())

    @property
    def falls_with_size(self) -> bool | None:
        """None where it is not resolved."""
        if self.spread is None or abs(self.effect) <= 2 * self.spread:
            return None
        return False if self.effect < 0 else (None if self.rise else True)

    def sentence(self) -> str:
        """Whether the loss falls with size, in words."""
        if self.spread is None:
            return f"not resolved: {NO_SEEDS}"
        measured = (
            f"{self.effect:+.4f} nats from the smallest to the largest size, seeds spread {self.spread:.4f}"
        )
        if self.falls_with_size:
            return f"the loss falls with size: {measured}"
        if self.falls_with_size is False:
            return f"the loss does not fall with size: {measured}"
        if self.effect > 2 * self.spread:
            return f"not resolved at this budget: {measured}, yet {self.rise}"
        return f"not resolved at this budget: {measured}, and the effect must exceed twice that"


def judge(points: Sequence[Point], *, starts: int = STARTS, samples: int = BOOTSTRAPS) -> Verdict:
    """All that can be said of the models of one architecture."""
    spread, most = seed_spread(points), points_for("power", points)
    fits = {
        name: _fitted(points_for(name, points), name, spread, starts=starts, samples=samples) for name in LAWS
    }
    return Verdict(
        fits=fits,
        effect=_effect(most),
        rise=_rise(most, spread),
        spread=spread,
        growth=growth(points, spread),
        warnings=tuple(_warnings(points, spread)),
    )


def points_for(name: LawName, points: Sequence[Point]) -> list[Point]:
    """Those that the law is fitted to: without a term of the data it is one of the most data."""
    if name == "chinchilla":
        return list(points)
    most = max((point.tokens for point in points), default=0.0)
    return [point for point in points if point.tokens == most]


def seed_spread(points: Sequence[Point]) -> float | None:
    """Standard deviation of the loss over seeds, pooled over cells; None where no cell has two."""
    cells = _cells(points)
    squares = [(np.var(losses, ddof=1), len(losses) - 1) for losses in cells.values() if len(losses) > 1]
    if not squares:
        return None
    total = sum(variance * freedom for variance, freedom in squares)
    return float(np.sqrt(total / sum(freedom for _, freedom in squares)))


def shortfalls(points: Sequence[Point], name: LawName, spread: float | None) -> list[str]:
    """Why the points cannot carry the law, before any fit; empty where they may."""
    rise = _rise(points, spread)
    return [*lacks(points, name), *([rise] if rise else [])]


def lacks(points: Sequence[Point], name: LawName) -> list[str]:
    """What the law needs and the points do not have, whatever their losses are; empty where nothing.

    points: those that the law is fitted to, `points_for`.
    """
    sizes = {point.parameters for point in points}
    amounts = {point.tokens for point in points}
    reasons = []
    if name == "chinchilla":
        if len(points) < FEWEST_POINTS:
            reasons.append(f"{len(points)} points, and {FEWEST_POINTS} are needed")
        if len(amounts) < FEWEST_AMOUNTS:
            reasons.append(f"{len(amounts)} amounts of data, and {FEWEST_AMOUNTS} are needed")
    # Three sizes would meet the three parameters of a floor exactly, and leave nothing to doubt them by.
    fewest = FEWEST_SIZES + (name == "floor")
    if len(sizes) < fewest:
        reasons.append(f"{len(sizes)} sizes, and {fewest} are needed")
    elif not _can_withhold(points, name):
        reasons.append("too few points are left without the largest size")
    if name == "chinchilla" and (reason := uncovered(points)):
        reasons.append(reason)
    return reasons


def held_out(
    points: Sequence[Point],
    name: LawName,
    spread: float | None,
    *,
    starts: int = STARTS,
    samples: int = BOOTSTRAPS,
) -> HeldOut | None:
    """The largest size predicted by the rest; None where the rest cannot be fitted."""
    if not _can_withhold(points, name):
        return None
    largest, rest = max(point.parameters for point in points), _without_largest(points)
    law = fit(rest, name=name, starts=starts)
    band = bootstrap(rest, law, samples=samples)
    slack = 2 * (spread or 0.0) + _ROUNDING
    errors, inside, near = [], [], []
    for point in points:
        if point.parameters < largest:
            continue
        where = {"parameters": point.parameters, "tokens": point.tokens}
        errors.append(float(np.log(point.loss / law.loss(**where))))
        low, high = interval([each.loss(**where) for each in band], level=HELD_OUT_LEVEL)
        inside.append(low <= point.loss <= high)
        near.append(low - slack <= point.loss <= high + slack)
    return HeldOut(
        size=largest,
        points=len(errors),
        error=float(np.abs(errors).mean()),
        bias=float(np.mean(errors)),
        covered=float(np.mean(inside)),
        explained=None if spread is None else float(np.mean(near)),
    )


def _fitted(
    points: Sequence[Point], name: LawName, spread: float | None, *, starts: int, samples: int
) -> Fitted:
    reasons = shortfalls(points, name, spread)
    if len(points) < _size(name):
        return Fitted(law=None, reasons=tuple(reasons) or ("fewer points than parameters",))
    law = fit(points, name=name, starts=starts)
    drawn = bootstrap(points, law, samples=samples)
    withheld = held_out(points, name, spread, starts=starts, samples=samples)
    if law.at_bound:
        reasons.append("the floor E ended at its bound: the points know of none")
    reasons += [*_unresolved(drawn), *_missed(withheld)]
    if name == "chinchilla" and not uncovered(points):
        reasons += _boundary(points)
    return Fitted(law=law, samples=tuple(drawn), held_out=withheld, reasons=tuple(reasons))


def _unresolved(samples: Sequence[Law]) -> list[str]:
    """A term that may be constant is no effect, and what it takes from the floor is not determined."""
    ends = intervals(samples, level=LEVELS[-1])
    return [
        f"{name} may be 0 or less: no fall with {what} is resolved"
        for name, what in (("alpha", "size"), ("beta", "data"))
        if name in ends and ends[name][0] <= _ROUNDING
    ]


def _missed(held: HeldOut | None) -> list[str]:
    """A law that most of the withheld points are far from does not hold there."""
    if held is None or held.explained is None or held.explained >= 0.5:
        return []
    return [f"the withheld size is missed by {held.error:.2%}, more than the band and seeds explain"]


def _can_withhold(points: Sequence[Point], name: LawName) -> bool:
    rest = _without_largest(points)
    return len({point.parameters for point in rest}) >= FEWEST_SIZES - 1 and len(rest) >= _size(name)


def _without_largest(points: Sequence[Point]) -> list[Point]:
    largest = max((point.parameters for point in points), default=0.0)
    return [point for point in points if point.parameters < largest]


def _boundary(points: Sequence[Point]) -> list[str]:
    """The optimal size must be seen, not extrapolated to."""
    budgets = isoflops(points)
    if exponent(budgets) is None:
        found = sum(budget.optimum is not None for budget in budgets)
        reasons = sorted({budget.reason for budget in budgets if budget.reason})
        return [f"only {found} budgets have their best size inside the grid ({'; '.join(reasons)})"]
    return []


def _rise(points: Sequence[Point], spread: float | None) -> str:
    """Where a larger model is worse by more than seeds explain."""
    cells = {cell: float(np.mean(losses)) for cell, losses in _cells(points).items()}
    for tokens in sorted({tokens for _, tokens in cells}):
        row = sorted((size, loss) for (size, amount), loss in cells.items() if amount == tokens)
        for (size, loss), (larger, higher) in itertools.pairwise(row):
            if higher - loss > 2 * (spread or 0.0):
                return (
                    f"at {tokens:.3g} tokens the loss rises from {size:.3g} to {larger:.3g} parameters "
                    f"by {higher - loss:.4f}, more than seeds explain"
                )
    return ""


def _warnings(points: Sequence[Point], spread: float | None) -> list[str]:
    sizes = [point.parameters for point in points]
    found = []
    if sizes and max(sizes) / min(sizes) < 10:
        found.append("sizes span less than a factor of ten: exponents are of these sizes only")
    if spread is None:
        found.append(f"{NO_SEEDS}: noise is not known")
    return found


def _effect(points: Sequence[Point]) -> float:
    cells = sorted((size, float(np.mean(losses))) for (size, _), losses in _cells(points).items())
    return cells[0][1] - cells[-1][1] if cells else 0.0


def _cells(points: Sequence[Point]) -> dict[tuple[float, float], list[float]]:
    cells: dict[tuple[float, float], list[float]] = defaultdict(list)
    for point in points:
        cells[point.parameters, point.tokens].append(point.loss)
    return cells


def _size(name: LawName) -> int:
    return {"power": 2, "floor": 3, "chinchilla": 5}[name]
