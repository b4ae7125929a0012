"""What a sweep may claim: sound points carry a law, others are refused with the reason."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest

from lib.scaling.isoflop import NO_SEEDS, covered, exponent, growth, isoflops, uncovered
from lib.scaling.judge import held_out, judge, lacks, seed_spread, shortfalls
from lib.scaling.laws import Point, fit

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


def test_sound_points_carry_every_law_and_predict_what_was_withheld() -> None:
    verdict = judge(grid(noise=0.003, seeds=2), **QUICK)
    fitted = verdict.fits["chinchilla"]
    assert fitted.status == "ok" and fitted.law is not None
    assert fitted.law.floor == pytest.approx(1.8, abs=0.1)
    assert fitted.held_out is not None and fitted.held_out.size == SIZES[-1]
    assert fitted.held_out.error < 0.005 and fitted.held_out.points == 2 * len(TOKENS)
    assert verdict.falls_with_size and "the loss falls with size" in verdict.sentence()
    assert verdict.spread == pytest.approx(0.003, rel=0.5)
    content = fitted.to_json()
    assert set(content["ci"]) == {"80%", "95%"} and content["ci"]["80%"]["E"][0] < 1.9


def test_a_wrong_law_is_found_out_by_what_was_withheld() -> None:
    """The document's law has no floor: it fits what it saw, and is too optimistic beyond it."""
    points = only(grid(), tokens=TOKENS[-1])
    without, with_floor = (held_out(points, name, None, **QUICK) for name in ("power", "floor"))
    assert without is not None and with_floor is not None
    assert without.error > 10 * with_floor.error and without.bias > 0
    unseen = fit(points[:-1], name="power", starts=QUICK["starts"]).loss(
        parameters=SIZES[-1], tokens=TOKENS[-1]
    )
    assert without.bias == pytest.approx(np.log(points[-1].loss / unseen), rel=1e-6), "it was not withheld"


def test_too_few_points_sizes_or_amounts_are_refused() -> None:
    points = grid()
    few = points[:11]
    assert any("11 points" in reason for reason in shortfalls(few, "chinchilla", 0.01))
    two = [point for point in points if point.parameters in SIZES[:2]]
    assert any("2 sizes" in reason for reason in shortfalls(two, "chinchilla", 0.01))
    short = [point for point in points if point.tokens in TOKENS[:2]]
    assert any("2 amounts" in reason for reason in shortfalls(short, "chinchilla", 0.01))
    assert shortfalls(points, "chinchilla", 0.01) == []
    three = [point for point in only(points, tokens=TOKENS[0]) if point.parameters in SIZES[:3]]
    assert lacks(three, "floor") == ["3 sizes, and 4 are needed"] and lacks(three, "power") == []
    largest = [
        point for point in points if point.parameters == SIZES[2] or point in points[2:4] + points[5:7]
    ]
    assert lacks(largest + largest[-4:], "chinchilla") == ["too few points are left without the largest size"]
    assert judge(few, **QUICK).fits["chinchilla"].status == "insufficient"


def test_a_rise_beyond_the_seeds_is_refused_and_one_within_is_not() -> None:
    points = [
        dataclasses.replace(point, loss=point.loss + 0.8) if point.parameters == SIZES[2] else point
        for point in grid()
    ]
    assert any("rises from" in reason for reason in shortfalls(points, "chinchilla", 0.01))
    assert shortfalls(points, "chinchilla", 1.0) == []
    rises = [
        Point(parameters=size, tokens=1e7, loss=loss)
        for size, loss in zip(SIZES, (5, 4, 3, 2, 2.3), strict=True)
    ]
    assert shortfalls(rises, "power", 0.16) == [] and len(shortfalls(rises, "power", 0.14)) == 1


def test_an_optimum_at_the_border_is_refused() -> None:
    border = [
        Point(parameters=size, tokens=tokens, loss=loss(size, tokens))
        for size, tokens in itertools.product((1e4, 3e4, 1e5, 3e5), TOKENS)
    ]
    assert exponent(isoflops(border)) is None
    reasons = judge(border, **QUICK).fits["chinchilla"].reasons
    assert any("best size inside the grid" in reason for reason in reasons)


def test_parabolas_find_the_exponent_of_the_optimum() -> None:
    dense = [
        Point(parameters=size, tokens=tokens, loss=loss(size, tokens))
        for size, tokens in itertools.product(np.geomspace(1e5, 1e9, 17), np.geomspace(1e6, 1e11, 40))
    ]
    found = exponent(isoflops(dense))
    assert found == pytest.approx(0.5, abs=0.05)
    quiet = growth(dense[::8], 1e-4)
    assert quiet.exponent == pytest.approx(0.5, abs=0.1) and quiet.interval is not None
    low, high = quiet.interval
    assert low < quiet.exponent < high < low + 0.1


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
    refused = growth(noise, 0.01)
    assert refused.exponent is None and "draws of the noise of seeds" in refused.reason
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


def test_a_fall_from_end_to_end_with_a_rise_between_is_none() -> None:
    """Of noise, one in eight sweeps falls from its smallest to its largest size by twice the spread."""
    points = only(grid(), tokens=TOKENS[-1])
    points += [dataclasses.replace(points[0], seed=1, loss=points[0].loss + 0.01)]
    assert judge(points, starts=8, samples=20).falls_with_size
    points[-2] = dataclasses.replace(points[-2], loss=points[-3].loss + 0.03)
    verdict = judge(points, starts=8, samples=20)
    assert verdict.effect > 2 * (verdict.spread or 0) and verdict.falls_with_size is None
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


def test_a_law_that_misses_what_was_withheld_by_more_than_seeds_is_refused() -> None:
    """Without a floor the law is wrong; with one it is right, and a band without noise is no reason."""
    fits = judge(grid(noise=0.002, seeds=2), starts=8, samples=20).fits
    assert [fits[name].status for name in ("floor", "chinchilla")] == ["ok", "ok"]
    (reason,) = fits["power"].reasons
    assert re.fullmatch(
        r"the withheld size is missed by \d+\.\d+%, more than the band and seeds explain", reason
    )


def test_the_spread_is_pooled_over_cells() -> None:
    points = [
        Point(parameters=1e5, tokens=1e6, loss=value, seed=seed) for seed, value in enumerate((1.0, 3.0))
    ]
    points += [
        Point(parameters=1e6, tokens=1e6, loss=value, seed=seed) for seed, value in enumerate((5.0, 5.0, 5.0))
    ]
    assert seed_spread(points) == pytest.approx((2.0 / 3) ** 0.5)


def test_budgets_that_too_few_sizes_meet_are_refused_before_any_loss() -> None:
    """Three small sizes and three large ones: of five budgets only the first and the last meet three."""
    sizes = (1e4, 1.1e4, 1.2e4, 1e8, 1.1e8, 1.2e8)
    points = [
        Point(parameters=size, tokens=tokens, loss=math.nan)
        for size, tokens in itertools.product(sizes, (1e6, 2e6, 4e6))
    ]
    assert [len(near) for _, near in covered(points)] == [3, 3]
    assert uncovered(points).startswith("2 budgets")
    assert lacks(points, "chinchilla") == [uncovered(points)]
    alike = [point for point in points if point.parameters < 1e6]
    assert len(covered(alike)) == 5 and not uncovered(alike)
    apart = [dataclasses.replace(point, parameters=2e4 * point.tokens / 1e6) for point in points]
    apart = [dataclasses.replace(point, tokens=tokens) for point in apart for tokens in (1e6, 4e6)]
    assert covered(apart) == [], "sizes a factor of four apart meet at one budget, which is no law"
