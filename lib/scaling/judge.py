"""What a sweep can claim: fits with their doubt, a prediction of what was withheld, or a refusal.

A fit that looks good says nothing: every claim here is tested on the dearest runs, which it has not seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from lib.scaling.isoflop import NO_SEEDS, Growth, growth, uncovered
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
from lib.scaling.noise import CHANCE, Noise, least_difference, rows, seed_noise

FEWEST_POINTS, FEWEST_SIZES, FEWEST_AMOUNTS = 12, 3, 3
LEVELS = (0.8, 0.95)
HELD_OUT_LEVEL, HELD_OUT_SHARE = 0.9, 4  # a quarter of the cells
LAST_FACTOR = 4  # of size, over which the loss has to fall still
_ROUNDING = 1e-6  # what it makes of nothing is smaller
LAWS: tuple[LawName, ...] = get_args(LawName)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """How well a law predicts the dearest quarter of the cells, which it was fitted without.

    flops: 6 N D of the cheapest of them. error: mean absolute error of the log of the loss. covered: share of
    the points in the 90 % band. explained: share in that band made wider by what seeds explain; None where
    that is not known.
    """

    flops: float
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
    data, a larger model is worse by more than seeds explain; empty where none is. least: the least effect
    that is more than seeds explain. spread: standard deviation over seeds; None without repeated seeds.
    growth: of the best size with the budget.
    """

    fits: dict[LawName, Fitted]
    effect: float
    least: float
    rise: str
    spread: float | None
    growth: Growth
    warnings: tuple[str, ...] = field(default=())

    @property
    def falls_with_size(self) -> bool | None:
        """None where it is not resolved."""
        if self.spread is None or abs(self.effect) <= self.least:
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
        if self.effect > self.least:
            return f"not resolved at this budget: {measured}, yet {self.rise}"
        return f"not resolved at this budget: {measured}, and less than {self.least:.4f} can be chance"


def judge(points: Sequence[Point], *, starts: int = STARTS, samples: int = BOOTSTRAPS) -> Verdict:
    """All that can be said of the models of one architecture."""
    noise, most = seed_noise(points), points_for("power", points)
    effect, least = _effect(most, noise)
    return Verdict(
        fits={name: fitted(points, name, starts=starts, samples=samples) for name in LAWS},
        effect=effect,
        least=least,
        rise=_rise(most, noise),
        spread=noise.deviation if noise else None,
        growth=growth(points, noise),
        warnings=tuple(_warnings(points, noise)),
    )


def fitted(
    points: Sequence[Point], name: LawName, *, starts: int = STARTS, samples: int = BOOTSTRAPS
) -> Fitted:
    """One law, of all that was trained."""
    noise, own = seed_noise(points), points_for(name, points)
    reasons = shortfalls(own, name, noise)
    if len(own) < _size(name):
        return Fitted(law=None, reasons=tuple(reasons) or ("fewer points than parameters",))
    law = fit(own, name=name, starts=starts)
    drawn = bootstrap(own, law, samples=samples)
    withheld = held_out(own, name, noise, starts=starts, samples=samples)
    if law.at_bound:
        reasons.append("the floor E ended at its bound: the points know of none")
    reasons += [*_unresolved(drawn), *_missed(withheld)]
    return Fitted(law=law, samples=tuple(drawn), held_out=withheld, reasons=tuple(reasons))


def points_for(name: LawName, points: Sequence[Point]) -> list[Point]:
    """Those that the law is fitted to: without a term of the data it is one of the most data."""
    if name == "chinchilla":
        return list(points)
    most = max((point.tokens for point in points), default=0.0)
    return [point for point in points if point.tokens == most]


def shortfalls(points: Sequence[Point], name: LawName, noise: Noise | None) -> list[str]:
    """Why the points cannot carry the law, before any fit; empty where they may."""
    found = [_rise(points, noise), _level(points, noise)]
    return [*lacks(points, name), *(reason for reason in found if reason)]


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
        reasons.append("too few points are left without the dearest quarter")
    if name == "chinchilla" and (reason := uncovered(points)):
        reasons.append(reason)
    return reasons


def held_out(
    points: Sequence[Point],
    name: LawName,
    noise: Noise | None,
    *,
    starts: int = STARTS,
    samples: int = BOOTSTRAPS,
) -> HeldOut | None:
    """The dearest quarter of the cells predicted by the rest; None where the rest cannot be fitted.

    The largest size alone would be one cell at each amount of data: a law that fits it by luck passes.
    """
    if not _can_withhold(points, name):
        return None
    rest, dearest = _parted(points)
    law = fit(rest, name=name, starts=starts)
    band = bootstrap(rest, law, samples=samples)
    slack = (noise.limit(CHANCE / 2) if noise else 0.0) + _ROUNDING
    errors, inside, near = [], [], []
    for point in dearest:
        where = {"parameters": point.parameters, "tokens": point.tokens}
        errors.append(float(np.log(point.loss / law.loss(**where))))
        low, high = interval([each.loss(**where) for each in band], level=HELD_OUT_LEVEL)
        inside.append(low <= point.loss <= high)
        near.append(low - slack <= point.loss <= high + slack)
    return HeldOut(
        flops=min(6 * point.parameters * point.tokens for point in dearest),
        points=len(errors),
        error=float(np.abs(errors).mean()),
        bias=float(np.mean(errors)),
        covered=float(np.mean(inside)),
        explained=float(np.mean(near)) if noise else None,
    )


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
    return [f"what was withheld is missed by {held.error:.2%}, more than the band and seeds explain"]


def _can_withhold(points: Sequence[Point], name: LawName) -> bool:
    rest = _parted(points)[0]
    return len({point.parameters for point in rest}) >= FEWEST_SIZES - 1 and len(rest) >= _size(name)


def _parted(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Those of the cheaper cells, and those of the dearest quarter, which is at least one cell."""
    cells = sorted({(p.parameters * p.tokens, p.parameters) for p in points})
    kept = set(cells[: len(cells) - max(1, len(cells) // HELD_OUT_SHARE)])
    parts: tuple[list[Point], list[Point]] = ([], [])
    for point in points:
        parts[(point.parameters * point.tokens, point.parameters) not in kept].append(point)
    return parts


def _rise(points: Sequence[Point], noise: Noise | None) -> str:
    """Where a larger model is worse by more than seeds explain, the many comparisons allowed for."""
    pairs = [
        (tokens, size, larger)
        for tokens, row in rows(points).items()
        for size, larger in itertools.pairwise(row)
    ]
    for tokens, size, larger in pairs:
        rise = larger.loss - size.loss
        if rise > least_difference(size, larger, noise, chance=CHANCE / len(pairs)):
            return (
                f"at {tokens:.3g} tokens the loss rises from {size.parameters:.3g} to "
                f"{larger.parameters:.3g} parameters by {rise:.4f}, more than seeds explain"
            )
    return ""


def _level(points: Sequence[Point], noise: Noise | None) -> str:
    """Where the largest models, at the most data, are no better than those of a quarter of the size.

    Of a loss that has stopped falling the laws make a steep power and a floor, which predict what was
    withheld: this alone tells it.
    """
    row = [*rows(points).values()][-1] if points else []
    if len(row) < 2:
        return ""
    largest = row[-1]
    start = max(
        (size for size in row if LAST_FACTOR * size.parameters <= largest.parameters),
        default=row[0],
        key=lambda size: size.parameters,
    )
    fall = start.loss - largest.loss
    if fall > least_difference(start, largest, noise, chance=CHANCE / 2):
        return ""
    return (
        f"from {start.parameters:.3g} to {largest.parameters:.3g} parameters the loss falls by {fall:.4f}, "
        "no more than seeds explain: it may have stopped falling"
    )


def _warnings(points: Sequence[Point], noise: Noise | None) -> list[str]:
    sizes = [point.parameters for point in points]
    found = []
    if sizes and max(sizes) / min(sizes) < 10:
        found.append("sizes span less than a factor of ten: exponents are of these sizes only")
    if noise is None:
        found.append(f"{NO_SEEDS}: noise is not known")
    return found


def _effect(points: Sequence[Point], noise: Noise | None) -> tuple[float, float]:
    """Loss of the smallest size minus that of the largest, and what more than seeds explain would be."""
    for row in rows(points).values():
        return row[0].loss - row[-1].loss, least_difference(row[0], row[-1], noise, chance=CHANCE / 2)
    return 0.0, 0.0


def _size(name: LawName) -> int:
    return {"power": 2, "floor": 3, "chinchilla": 5}[name]
