"""Conclusions that a sweep supports: fitted laws with intervals and a holdout test, or reasons for refusal.

A good fit alone proves nothing: every law is also tested on the most expensive runs, which it was fitted
without.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lib.scaling.isoflop import NO_SEEDS, Growth, budget_shortfall, growth
from lib.scaling.laws import BOOTSTRAPS, STARTS, Law, LawName, Point, bootstrap, fit, interval, intervals
from lib.scaling.noise import CHANCE, Noise, seed_noise, significant_difference, sizes_by_tokens

MIN_POINTS, MIN_SIZES, MIN_AMOUNTS = 12, 3, 3
LEVELS = (0.8, 0.95)
HOLDOUT_LEVEL, HOLDOUT_SHARE = 0.9, 4  # a quarter of the cells
LAST_FACTOR = 4  # the loss must still fall over the last factor of this much in size
_ROUNDING = 1e-6  # bound of rounding errors
_FREE_PARAMETERS: dict[LawName, int] = {"power": 2, "floor": 3, "chinchilla": 5}
TITLES: dict[LawName, str] = {
    "power": "L = A N^-alpha, at the most data",
    "floor": "L = E + A N^-alpha, at the most data",
    "chinchilla": "L = E + A N^-alpha + B D^-beta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Prediction of the most expensive quarter of the cells by a law that was fitted without them.

    flops: 6 N D of the cheapest of them. error, bias: mean absolute and mean error of the log of the loss.
    covered: share of points in the 90 % band. explained: share in that band widened by seed noise; None if
    the noise is unknown.
    """

    flops: float
    points: int
    error: float
    bias: float
    covered: float
    explained: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLaw:
    """A law with bootstrap samples and holdout test. status: "ok", or "insufficient" for `reasons`."""

    law: Law | None
    samples: tuple[Law, ...] = ()
    holdout: Holdout | None = None
    reasons: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """Return "ok" or "insufficient"."""
        return "insufficient" if self.reasons else "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the law in scaling_law.json."""
        content: dict[str, Any] = {"status": self.status, "reasons": list(self.reasons)}
        if self.law is not None:
            content |= dataclasses.asdict(self.law)
        if self.samples:
            content["ci"] = {f"{level:.0%}": intervals(self.samples, level=level) for level in LEVELS}
        return content | {"holdout": dataclasses.asdict(self.holdout) if self.holdout else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All conclusions about one architecture.

    effect: loss of the smallest size minus that of the largest, at the most data. min_effect: the smallest
    effect that exceeds seed noise. rise: where, at the most data, a larger model is significantly worse;
    empty if nowhere. spread: standard deviation over seeds; None without repeated seeds. growth: of the
    optimal size with the budget.
    """

    fits: dict[LawName, FittedLaw]
    effect: float
    min_effect: float
    rise: str
    spread: float | None
    growth: Growth
    warnings: tuple[str, ...] = ()

    @property
    def falls_with_size(self) -> bool | None:
        """True or false if the effect is significant; None if it is not resolved."""
        if self.spread is None or abs(self.effect) <= self.min_effect:
            return None
        return False if self.effect < 0 else (None if self.rise else True)

    def sentence(self) -> str:
        """Return whether the loss falls with size, as a sentence."""
        if self.spread is None:
            return f"not resolved: {NO_SEEDS}"
        measured = (
            f"{self.effect:+.4f} nats from the smallest to the largest size, "
            f"standard deviation over seeds {self.spread:.4f}"
        )
        if self.falls_with_size is not None:
            return f"the loss {'falls' if self.falls_with_size else 'does not fall'} with size: {measured}"
        if self.effect > self.min_effect:
            return f"not resolved at this budget: {measured}, yet {self.rise}"
        return f"not resolved at this budget: {measured}, and less than {self.min_effect:.4f} can be chance"


def judge(points: Sequence[Point], *, starts: int = STARTS, samples: int = BOOTSTRAPS) -> Verdict:
    """Return all conclusions about the models of one architecture."""
    noise, at_most_data = seed_noise(points), points_for("power", points)
    effect = min_effect = 0.0
    for row in sizes_by_tokens(at_most_data).values():
        effect = row[0].loss - row[-1].loss
        min_effect = significant_difference(row[0], row[-1], noise, chance=CHANCE / 2)
    return Verdict(
        fits={name: fit_law(points, name, starts=starts, samples=samples) for name in TITLES},
        effect=effect,
        min_effect=min_effect,
        rise=_rise(at_most_data, noise),
        spread=noise.deviation if noise else None,
        growth=growth(points, noise),
        warnings=tuple(_warnings(points, noise)),
    )


def fit_law(points: Sequence[Point], name: LawName, *, starts: int, samples: int) -> FittedLaw:
    """Fit one law and collect the reasons against it."""
    noise, own = seed_noise(points), points_for(name, points)
    reasons = shortfalls(own, name, noise)
    if len(own) < _FREE_PARAMETERS[name]:
        return FittedLaw(law=None, reasons=tuple(reasons) or ("fewer points than parameters",))
    law = fit(own, name=name, starts=starts)
    drawn = bootstrap(own, law, samples=samples)
    holdout = check_holdout(own, name, noise, starts=starts, samples=samples)
    if law.at_bound:
        reasons.append("the floor E ended at its bound: the points do not determine it")
    ends = intervals(drawn, level=LEVELS[-1])
    # A term that may be constant is no effect, and trades off against the floor.
    reasons += [
        f"{term} may be 0 or less: no fall with {what} is resolved"
        for term, what in (("alpha", "size"), ("beta", "data"))
        if term in ends and ends[term][0] <= _ROUNDING
    ]
    if holdout is not None and holdout.explained is not None and holdout.explained < 0.5:
        reasons.append(
            f"the holdout is missed by {holdout.error:.2%}, more than the band and seed noise explain"
        )
    return FittedLaw(law=law, samples=tuple(drawn), holdout=holdout, reasons=tuple(reasons))


def points_for(name: LawName, points: Sequence[Point]) -> list[Point]:
    """Return the points that the law is fitted to: without a data term, those of the most data."""
    if name == "chinchilla":
        return list(points)
    most = max((point.tokens for point in points), default=0.0)
    return [point for point in points if point.tokens == most]


def shortfalls(points: Sequence[Point], name: LawName, noise: Noise | None) -> list[str]:
    """Return the reasons why the points cannot support the law, known before any fit."""
    found = [_rise(points, noise), _plateau(points, noise)]
    return [*missing_requirements(points, name), *(reason for reason in found if reason)]


def missing_requirements(points: Sequence[Point], name: LawName) -> list[str]:
    """Return what the law needs and `points` (from `points_for`) lack, independent of their losses."""
    sizes = {point.parameters for point in points}
    amounts = {point.tokens for point in points}
    reasons = []
    if name == "chinchilla":
        if len(points) < MIN_POINTS:
            reasons.append(f"{len(points)} points, and {MIN_POINTS} are needed")
        if len(amounts) < MIN_AMOUNTS:
            reasons.append(f"{len(amounts)} amounts of data, and {MIN_AMOUNTS} are needed")
    # Three sizes would determine the three parameters of a floor exactly, without a residual to test.
    needed = MIN_SIZES + (name == "floor")
    if len(sizes) < needed:
        reasons.append(f"{len(sizes)} sizes, and {needed} are needed")
    elif not _can_hold_out(points, name):
        reasons.append("too few points are left without the most expensive quarter")
    if name == "chinchilla" and (reason := budget_shortfall(points)):
        reasons.append(reason)
    return reasons


def check_holdout(
    points: Sequence[Point], name: LawName, noise: Noise | None, *, starts: int, samples: int
) -> Holdout | None:
    """Predict the most expensive quarter of the cells from the rest; None if the rest cannot be fitted.

    The largest size alone would be one cell per amount of data, which a wrong law can match by chance.
    """
    if not _can_hold_out(points, name):
        return None
    rest, heldout = _split(points)
    law = fit(rest, name=name, starts=starts)
    band = bootstrap(rest, law, samples=samples)
    slack = (noise.limit(CHANCE / 2) if noise else 0.0) + _ROUNDING
    errors, inside, near = [], [], []
    for point in heldout:
        where = {"parameters": point.parameters, "tokens": point.tokens}
        errors.append(float(np.log(point.loss / law.loss(**where))))
        low, high = interval([each.loss(**where) for each in band], level=HOLDOUT_LEVEL)
        inside.append(low <= point.loss <= high)
        near.append(low - slack <= point.loss <= high + slack)
    return Holdout(
        flops=min(6 * point.parameters * point.tokens for point in heldout),
        points=len(errors),
        error=float(np.abs(errors).mean()),
        bias=float(np.mean(errors)),
        covered=float(np.mean(inside)),
        explained=float(np.mean(near)) if noise else None,
    )


def _can_hold_out(points: Sequence[Point], name: LawName) -> bool:
    rest = _split(points)[0]
    sizes = {point.parameters for point in rest}
    return len(sizes) >= MIN_SIZES - 1 and len(rest) >= _FREE_PARAMETERS[name]


def _split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Split off the points of the most expensive quarter of the cells, at least one cell."""
    cells = sorted({(p.parameters * p.tokens, p.parameters) for p in points})
    kept = set(cells[: len(cells) - max(1, len(cells) // HOLDOUT_SHARE)])
    parts: tuple[list[Point], list[Point]] = ([], [])
    for point in points:
        parts[(point.parameters * point.tokens, point.parameters) not in kept].append(point)
    return parts


def _rise(points: Sequence[Point], noise: Noise | None) -> str:
    """Describe where a larger model is significantly worse, corrected for the number of comparisons."""
    rows = sizes_by_tokens(points)
    pairs = [(tokens, *pair) for tokens, row in rows.items() for pair in itertools.pairwise(row)]
    for tokens, size, larger in pairs:
        rise = larger.loss - size.loss
        if rise > significant_difference(size, larger, noise, chance=CHANCE / len(pairs)):
            return (
                f"at {tokens:.3g} tokens the loss rises from {size.parameters:.3g} to "
                f"{larger.parameters:.3g} parameters by {rise:.4f}, more than seed noise explains"
            )
    return ""


def _plateau(points: Sequence[Point], noise: Noise | None) -> str:
    """Describe a loss that no longer falls over the last factor of four in size, at the most data.

    The holdout test cannot detect it: a steep power with a floor predicts a saturated loss well.
    """
    row = [*sizes_by_tokens(points).values()][-1] if points else []
    if len(row) < 2:
        return ""
    largest = row[-1]
    starts = [size for size in row if LAST_FACTOR * size.parameters <= largest.parameters]
    start = starts[-1] if starts else row[0]
    fall = start.loss - largest.loss
    if fall > significant_difference(start, largest, noise, chance=CHANCE / 2):
        return ""
    return (
        f"from {start.parameters:.3g} to {largest.parameters:.3g} parameters the loss falls by {fall:.4f}, "
        "no more than seed noise explains: it may have stopped falling"
    )


def _warnings(points: Sequence[Point], noise: Noise | None) -> list[str]:
    sizes, found = [point.parameters for point in points], []
    if sizes and max(sizes) / min(sizes) < 10:
        found.append("sizes span less than a factor of ten: exponents hold for these sizes only")
    if noise is None:
        found.append(f"{NO_SEEDS}: the noise is unknown")
    return found
