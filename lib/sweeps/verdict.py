"""Verdict on the paired differences of two configurations: better, worse, not shown or identical.

A group-sequential paired t test, two-sided, with an error of LEVEL over all looks together. The looks
(numbers of pairs after which the differences are tested) are fixed beforehand; each is tested at the same
nominal level (Pocock 1977), found by simulating t statistics, since his table holds for a known variance.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lib.errors import ConfigError

Word: TypeAlias = Literal["better", "worse", "not shown", "identical"]
Values: TypeAlias = npt.NDArray[np.float64]

LEVEL = 0.05
LOOKS = (3, 5, 8, 12, 18, 27, 40)  # numbers of pairs at which people look
_TRIALS, _POWER_TRIALS = 50_000, 20_000
_LEVEL_ERROR = 0.001  # standard error of a share of LEVEL in so many trials
_MAX_FLIPPED, _ROWS = 12, 1000  # at most 2^12 sign patterns by 1000 rows in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Answer after some pairs. low, high: confidence interval of the mean difference, 1 - level.

    level: nominal level of this look. p: two-sided p value of it. sd: of the differences.
    """

    word: Word
    pairs: int
    mean: float
    sd: float
    low: float
    high: float
    p: float
    level: float


def judge(
    differences: Sequence[float], looks: Sequence[int], *, higher_is_better: bool, all_equal: bool = False
) -> Verdict:
    """Judge all differences B - A known now, at the look of that number of pairs.

    looks: ascending numbers of pairs, all that were or may be looked at. all_equal: in no pair does any
    metric differ; where only this one does not, it may be too coarse. Raises ConfigError where the number of
    differences is none of the looks.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) not in looks:
        raise ConfigError(f"{len(values)} pairs are none of the looks {' '.join(map(str, looks))}")
    level = nominal_level(tuple(looks))
    mean, sd, p = float(values.mean()), float(values.std(ddof=1)), float(p_values(values[None])[0])
    margin = t_quantile(1 - level / 2, len(values) - 1) * sd / math.sqrt(len(values))
    word: Word = "not shown"
    if all_equal:
        word = "identical"
    elif p <= level:
        word = "better" if (mean > 0) == higher_is_better else "worse"
    interval = {"low": mean - margin, "high": mean + margin}
    return Verdict(word=word, pairs=len(values), mean=mean, sd=sd, **interval, p=p, level=level)


def planned_looks(requested: Sequence[int], *, reused: int = 0) -> tuple[int, ...]:
    """Return the looks of a comparison of which `reused` pairs exist: people may have looked at those before.

    Raises ConfigError unless the requested numbers ascend from at least 2.
    """
    if not requested or min(requested) < 2 or sorted(set(requested)) != list(requested):
        todo = f"write ascending numbers of pairs from 2, such as {' '.join(map(str, LOOKS[:3]))}"
        raise ConfigError(f"cannot judge after {' '.join(map(str, requested)) or 'no'} pairs", todo=todo)
    spent = {look for look in (*LOOKS, reused) if 2 <= look <= reused and look < requested[-1]}
    return tuple(sorted(spent | set(requested)))


@functools.cache
def nominal_level(looks: tuple[int, ...]) -> float:
    """Return the level of each look: normal differences of mean 0 are called different in LEVEL of cases."""
    if len(looks) == 1:
        return LEVEL
    normal = np.random.default_rng(0).standard_normal((_TRIALS, looks[-1]))
    smallest = np.minimum.reduce([_t_test(normal[:, :look]) for look in looks])
    return float(np.quantile(smallest, LEVEL - _LEVEL_ERROR))


def power(effect: float, looks: tuple[int, ...]) -> float:
    """Return the probability of a verdict where the mean difference is `effect` standard deviations."""
    normal = np.random.default_rng(1).standard_normal((_POWER_TRIALS, looks[-1])) + effect
    level = nominal_level(looks)
    return float(np.logical_or.reduce([_t_test(normal[:, :look]) <= level for look in looks]).mean())


def p_values(differences: Values) -> Values:
    """Return the two-sided p value of each row of differences [trials, pairs].

    The t test finds coarse differences different too often: five that can only be -1 or 1 are equal in 1 of
    16 cases. Where at most half of a row's sizes are distinct, its exact sign-flip test must agree.
    """
    found = _t_test(differences)
    pairs = differences.shape[1]
    sizes = np.sort(np.abs(differences), axis=1)
    distinct = 1 + (np.diff(sizes, axis=1) > 0).sum(axis=1)
    coarse = np.flatnonzero((distinct <= pairs / 2) & (found <= LEVEL))
    for start in range(0, len(coarse), _ROWS):
        rows = coarse[start : start + _ROWS]
        found[rows] = np.maximum(found[rows], _sign_flip_test(differences[rows]))
    return found


def holm(p: Sequence[float]) -> list[float]:
    """Return p values with Holm's correction (1979) for their number."""
    order = np.argsort(p)
    scaled = np.asarray(p)[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted.tolist()


def _t_test(differences: Values) -> Values:
    pairs = differences.shape[1]
    mean, sd = differences.mean(axis=1), differences.std(axis=1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0, 0.0, mean / (sd / math.sqrt(pairs)))
    return np.maximum(0.0, 1 - _central_probability(t, pairs - 1))  # rounding may exceed a probability of 1


def _sign_flip_test(differences: Values) -> Values:
    """Return for each row the share of sign patterns whose sum is as far from 0 as the row's own."""
    pairs = differences.shape[1]
    if pairs <= _MAX_FLIPPED:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=pairs)))
    else:  # a sample of all patterns, with the one that is there: as exact, but for its resolution
        signs = np.random.default_rng(2).choice((-1.0, 1.0), (2**_MAX_FLIPPED, pairs))
        signs[0] = 1.0
    sums = np.abs(signs @ differences.T)
    return np.asarray((sums >= np.abs(differences.sum(axis=1)) * (1 - 1e-12)).mean(axis=0))


def _central_probability(t: Any, freedom: int) -> Values:
    """Return P(|T| <= |t|) of Student's t with whole degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    angle = np.arctan(np.abs(t) / math.sqrt(freedom))
    sine, cosine = np.sin(angle), np.cos(angle)
    odd = freedom % 2
    term = cosine.copy() if odd else np.ones_like(cosine)
    total = term.copy() if freedom > 1 else np.zeros_like(cosine)
    for number in range(2 + odd, freedom - 1, 2):
        term = term * cosine**2 * (number - 1) / number
        total += term
    return np.asarray((angle + sine * total) * 2 / math.pi if odd else sine * total)


@functools.cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return t with P(T <= t) = probability >= 0.5."""
    central = functools.partial(_central_probability, freedom=freedom)
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if central(middle) < 2 * probability - 1 else (low, middle)
    return high
