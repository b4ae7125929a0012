"""What a sweep may claim: sound points carry a law, others are refused with the reason."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest

from lib.scaling.isoflop import NO_SEEDS, budget_shortfall, exponent, growth, isoflops, shared_budgets
from lib.scaling.judge import check_holdout, judge, missing_requirements, shortfalls
from lib.scaling.laws import Point, fit
from lib.scaling.noise import Noise, seed_noise, sizes_by_tokens
from scripts.scaling_power import FACTORS, NOISES, Case, cases

SIZES = (3e5, 1e6, 3e6, 1e7, 3e7)
TOKENS = (1e7, 3e7, 1e8, 3e8)


def loss(size: float, tokens: float) -> float:
    return 1.8 + 168 * size**-0.35 + 480 * tokens**-0.35


def grid(*, noise: float = 0.0, seeds: int = 1) -> list[Point]:
    random = np.random.default_rng(0)
    return [
        Point(
            parameters=size,
            tokens=tokens,
            loss=loss(size, tokens) + noise * random.standard_normal(),
            seed=seed,
        )
        for size, tokens, seed in itertools.product(SIZES, TOKENS, range(seeds))
    ]


def only(points: list[Point], **wanted: float) -> list[Point]:
    return [point for point in points if all(getattr(point, name) == value for name, value in wanted.items())]


QUICK = {"starts": 40, "samples": 40}


def known(deviation: float) -> Noise:
    """From so many seeds that nothing is left to doubt."""
    return Noise(deviation=deviation, freedom=1000)


@pytest.mark.slow
def test_sound_points_carry_every_law_and_predict_what_was_withheld() -> None:
    verdict = judge(grid(noise=0.003, seeds=2), **QUICK)
    fitted = verdict.fits["chinchilla"]
    assert fitted.status == "ok" and fitted.law is not None
    assert fitted.law.floor == pytest.approx(1.8, abs=0.1)
    assert fitted.holdout is not None and fitted.holdout.flops == 6 * SIZES[-1] * TOKENS[-3]
    assert fitted.holdout.error < 0.005 and fitted.holdout.points == 2 * len(SIZES) * len(TOKENS) // 4
    assert verdict.falls_with_size and "the loss falls with size" in verdict.sentence()
    assert verdict.spread == pytest.approx(0.003, rel=0.5)
    content = fitted.to_json()
    assert set(content["ci"]) == {"80%", "95%"} and content["ci"]["80%"]["E"][0] < 1.9


def test_a_wrong_law_is_found_out_by_what_was_withheld() -> None:
    """The document's law has no floor: it fits what it saw, and is too optimistic beyond it."""
    points = only(grid(), tokens=TOKENS[-1])
    without, with_floor = (check_holdout(points, name, None, **QUICK) for name in ("power", "floor"))
    assert without is not None and with_floor is not None
    assert without.error > 10 * with_floor.error and without.bias > 0
    unseen = fit(points[:-1], name="power", starts=QUICK["starts"]).loss(
        parameters=SIZES[-1], tokens=TOKENS[-1]
    )
    assert without.bias == pytest.approx(np.log(points[-1].loss / unseen), rel=1e-6), "it was not withheld"


@pytest.mark.slow
def test_too_few_points_sizes_or_amounts_are_refused() -> None:
    points = grid()
    few = points[:11]
    assert any("11 points" in reason for reason in shortfalls(few, "chinchilla", known(0.01)))
    two = [point for point in points if point.parameters in SIZES[:2]]
    assert any("2 sizes" in reason for reason in shortfalls(two, "chinchilla", known(0.01)))
    short = [point for point in points if point.tokens in TOKENS[:2]]
    assert any("2 amounts" in reason for reason in shortfalls(short, "chinchilla", known(0.01)))
    assert shortfalls(points, "chinchilla", known(0.01)) == []
    three = [point for point in only(points, tokens=TOKENS[0]) if point.parameters in SIZES[:3]]
    assert (
        missing_requirements(three, "floor") == ["3 sizes, and 4 are needed"]
        and missing_requirements(three, "power") == []
    )
    one_size = [dataclasses.replace(points[0], tokens=tokens) for tokens in np.geomspace(1e7, 3e8, 10)]
    one_size += only(points, parameters=SIZES[3], tokens=TOKENS[3])
    one_size += only(points, parameters=SIZES[4], tokens=TOKENS[3])
    assert "too few points are left without the most expensive quarter" in missing_requirements(
        one_size, "chinchilla"
    )
    assert judge(few, **QUICK).fits["chinchilla"].status == "insufficient"


@pytest.mark.slow
def test_a_rise_beyond_the_seeds_is_refused_and_one_within_is_not() -> None:
    points = [
        dataclasses.replace(point, loss=point.loss + 0.8) if point.parameters == SIZES[2] else point
        for point in grid()
    ]
    assert any("rises from" in reason for reason in shortfalls(points, "chinchilla", known(0.01)))
    assert not any("rises from" in reason for reason in shortfalls(points, "chinchilla", known(1.0)))
    rises = [
        Point(parameters=size, tokens=1e7, loss=loss)
        for size, loss in zip(SIZES, (5, 4, 3, 2, 2.3), strict=True)
    ]
    assert shortfalls(rises, "power", known(0.10)) == []
    assert len(shortfalls(rises, "power", known(0.09))) == 1
    three_seeds = Noise(deviation=0.09, freedom=2)
    assert shortfalls(rises, "power", three_seeds) == [], "a spread of three seeds may be half of what it is"


def test_an_optimum_at_the_border_is_refused() -> None:
    border = [
        Point(parameters=size, tokens=tokens, loss=loss(size, tokens))
        for size, tokens in itertools.product((1e4, 3e4, 1e5, 3e5), TOKENS)
    ]
    assert exponent(isoflops(border)) is None
    verdict = judge(border, **QUICK)
    assert verdict.growth.exponent is None and "best size inside the grid" in verdict.growth.reason
    assert verdict.fits["chinchilla"].status == "ok", "the law says nothing of where the best size is"


@pytest.mark.slow
def test_parabolas_find_the_exponent_of_the_optimum() -> None:
    dense = [
        Point(parameters=size, tokens=tokens, loss=loss(size, tokens))
        for size, tokens in itertools.product(np.geomspace(1e5, 1e9, 17), np.geomspace(1e6, 1e11, 40))
    ]
    found = exponent(isoflops(dense))
    assert found == pytest.approx(0.5, abs=0.05)
    quiet = growth(dense[::8], known(1e-4))
    assert quiet.exponent == pytest.approx(0.5, abs=0.1) and quiet.interval is not None
    low, high = quiet.interval
    assert low < quiet.exponent < high < low + 0.1
    doubted = growth(dense[::8], Noise(deviation=1e-4, freedom=2)).interval
    assert doubted is not None and doubted[1] - doubted[0] > 1.5 * (high - low), "three seeds know less"


def test_seeds_of_a_cell_count_as_their_mean() -> None:
    sizes = [Point(parameters=size, tokens=tokens, loss=2.0) for size in SIZES for tokens in (1e6, 1e9)]
    twins = [dataclasses.replace(point, loss=loss) for point in sizes for loss in (1.0, 3.0)]
    assert [budget.losses for budget in isoflops(twins)] == [
        pytest.approx(budget.losses) for budget in isoflops(sizes)
    ]


def test_an_optimum_that_is_noise_is_refused() -> None:
    """Losses that follow from nothing curve upwards somewhere: an exponent can be read off, and is none."""
    random = np.random.default_rng(10)
    noise = [
        Point(parameters=size, tokens=tokens, loss=2 + 0.01 * random.standard_normal())
        for size, tokens in itertools.product(np.geomspace(1e5, 1e7, 12), (1e6, 2e6, 4e6))
    ]
    assert exponent(isoflops(noise)) is not None
    refused = growth(noise, known(0.01))
    assert refused.exponent is None and "draws of the seed noise" in refused.reason
    assert growth(noise, None).reason == NO_SEEDS


def test_an_effect_within_the_seeds_is_not_resolved() -> None:
    flat = [
        Point(parameters=size, tokens=1e7, loss=2.0 + 0.1 * sign, seed=seed)
        for size in SIZES[:3]
        for seed, sign in enumerate((-1, 0, 1))
    ]
    verdict = judge(flat, **QUICK)
    assert verdict.falls_with_size is None and "not resolved at this budget" in verdict.sentence()
    alone = judge(grid()[:4], **QUICK)
    assert alone.spread is None and "no cell has several seeds" in alone.sentence()


@pytest.mark.slow
def test_a_fall_from_end_to_end_with_a_rise_between_is_none() -> None:
    """Of noise, one in eight sweeps falls from its smallest to its largest size by twice the spread."""
    points = only(grid(), tokens=TOKENS[-1])
    seeds = [
        dataclasses.replace(points[0], seed=n, loss=points[0].loss + 0.01 * (n % 2)) for n in range(1, 9)
    ]
    assert judge(points + seeds, starts=8, samples=20).falls_with_size
    points[-1] = dataclasses.replace(points[-1], loss=points[-2].loss + 0.04)
    verdict = judge(points + seeds, starts=8, samples=20)
    assert verdict.effect > verdict.min_effect and verdict.falls_with_size is None
    assert re.search(r"^not resolved .* yet at 3e\+08 tokens the loss rises from", verdict.sentence())


@pytest.mark.slow
def test_a_loss_that_rises_is_told_and_carries_no_law_of_a_fall() -> None:
    points = [dataclasses.replace(point, loss=9 - point.loss) for point in grid(noise=0.001, seeds=2)]
    verdict = judge(points, starts=4, samples=10)
    assert verdict.falls_with_size is False
    assert verdict.sentence().startswith("the loss does not fall with size: -")
    assert any("alpha may be 0 or less" in reason for reason in verdict.fits["power"].reasons)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.003])
def test_a_loss_that_size_does_not_change_carries_no_law(noise: float) -> None:
    """Of a constant the terms E and A N^-0 are one: the fit finds some of each, and is sure of both."""
    random = np.random.default_rng(0)
    flat = [
        Point(parameters=size, tokens=1e7, loss=2 + noise * random.standard_normal(), seed=seed)
        for size, seed in itertools.product(SIZES, range(3))
    ]
    fits = judge(flat, starts=4, samples=10).fits
    assert {fitted.status for fitted in fits.values()} == {"insufficient"}
    assert any("alpha may be 0 or less" in reason for reason in fits["power"].reasons)


@pytest.mark.slow
def test_a_law_that_misses_what_was_withheld_by_more_than_seeds_is_refused() -> None:
    """Without a floor the law is wrong; with one it is right, and a band without noise is no reason."""
    fits = judge(grid(noise=0.002, seeds=2), starts=8, samples=20).fits
    assert [fits[name].status for name in ("floor", "chinchilla")] == ["ok", "ok"]
    (reason,) = fits["power"].reasons
    assert re.fullmatch(
        r"the holdout is missed by \d+\.\d+%, more than the band and seed noise explain", reason
    )


def test_the_spread_is_pooled_over_cells() -> None:
    points = [
        Point(parameters=1e5, tokens=1e6, loss=value, seed=seed) for seed, value in enumerate((1.0, 3.0))
    ]
    points += [
        Point(parameters=1e6, tokens=1e6, loss=value, seed=seed) for seed, value in enumerate((5.0, 5.0, 5.0))
    ]
    noise = seed_noise(points)
    assert noise is not None and noise.deviation == pytest.approx((2.0 / 3) ** 0.5) and noise.freedom == 3


def test_budgets_that_too_few_sizes_meet_are_refused_before_any_loss() -> None:
    """Three small sizes and three large ones: of five budgets only the first and the last meet three."""
    sizes = (1e4, 1.1e4, 1.2e4, 1e8, 1.1e8, 1.2e8)
    points = [
        Point(parameters=size, tokens=tokens, loss=math.nan)
        for size, tokens in itertools.product(sizes, (1e6, 2e6, 4e6))
    ]
    assert [len(near) for _, near in shared_budgets(points)] == [3, 3]
    assert budget_shortfall(points).startswith("2 budgets")
    assert missing_requirements(points, "chinchilla") == [budget_shortfall(points)]
    rounded = [
        Point(parameters=5547 * size, tokens=6870 * tokens, loss=math.nan)
        for size, tokens in itertools.product((1, 1.1, 1.2), (1, 4))
    ]
    assert len(shared_budgets(rounded)) == 5, "the least data is in a range, whatever rounding makes of it"
    alike = [point for point in points if point.parameters < 1e6]
    assert len(shared_budgets(alike)) == 5 and not budget_shortfall(alike)
    apart = [dataclasses.replace(point, parameters=2e4 * point.tokens / 1e6) for point in points]
    apart = [dataclasses.replace(point, tokens=tokens) for point in apart for tokens in (1e6, 4e6)]
    assert shared_budgets(apart) == [], "sizes a factor of four apart meet at one budget, which is no law"


@pytest.mark.parametrize(
    ("freedom", "chance", "limit"),
    [
        (1, 0.025, 12.7062),
        (2, 0.025, 4.30265),
        (3, 0.05, 2.35336),
        (10, 0.005, 3.16927),
        (40, 0.001, 3.30688),
    ],
)
def test_what_noise_exceeds_is_students_t(freedom: int, chance: float, limit: float) -> None:
    """Of the tables."""
    assert Noise(deviation=2.0, freedom=freedom).limit(chance) == pytest.approx(2 * limit, rel=1e-5)


def test_sizes_within_a_tenth_are_one() -> None:
    points = [
        Point(parameters=size, tokens=1e6, loss=loss)
        for size, loss in ((1000, 3.0), (1099, 4.0), (1101, 2.0), (5000, 1.0))
    ]
    (row,) = sizes_by_tokens(points).values()
    assert [(size.parameters, size.loss, size.runs) for size in row] == [
        (1049.5, 3.5, 2),
        (1101, 2.0, 1),
        (5000, 1.0, 1),
    ]


@pytest.mark.slow
def test_a_loss_that_has_stopped_falling_carries_no_law() -> None:
    """A steep power and a floor fit what saturates, and predict what was withheld of it."""
    points = [
        Point(parameters=size, tokens=1e7, loss=1.69 + 100 * min(size, 8e5) ** -0.34 + by, seed=seed)
        for size in np.geomspace(2e5, 5e7, 16)
        for seed, by in enumerate((-1e-3, 1e-3))
    ]
    fits = judge(points, starts=8, samples=20).fits
    assert all(any("may have stopped falling" in r for r in fit.reasons) for fit in fits.values())
    assert check_holdout(points, "floor", known(0.002), **QUICK).explained == 1.0  # type: ignore[union-attr]


def test_the_dearest_quarter_is_withheld_and_not_the_largest_size_alone() -> None:
    points = [
        Point(parameters=size, tokens=1e7, loss=2 + 90 * size**-0.3) for size in np.geomspace(1e4, 1e7, 12)
    ]
    spoiled = [
        dataclasses.replace(point, loss=point.loss * (1.1 if number in (9, 10) else 1))
        for number, point in enumerate(points)
    ]
    held = check_holdout(spoiled, "power", known(0.001), **QUICK)
    assert held is not None and held.points == 3 and held.flops == 6e7 * points[9].parameters
    assert held.explained is not None and held.explained < 0.5


# The extremes: a small term with much noise, and a large one with little; a flat loss has one factor.
EXTREMES = {(min(FACTORS), max(NOISES)), (max(FACTORS), min(NOISES))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if (case.factor, case.noise) in EXTREMES else [pytest.mark.long])
        for case in cases()
    ],
    ids=lambda case: f"{case.law}-{case.kind}-{case.factor:.0f}-{case.noise}",
)
def test_true_laws_are_accepted_and_others_refused_on_the_default_grid(case: Case) -> None:
    """`python -m scripts.scaling_power` has enough sweeps for the shares; these are the first of them."""
    assert case.share_refused(6) == (0 if case.kind == "true" else 1)
