"""The fitter: what it finds in points whose law is known, how wide its doubt is, how long it takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lib.scaling.laws import (
    HUBER_DELTA,
    Point,
    _huber,
    bootstrap,
    fit,
    interval,
    intervals,
    log_residuals,
)
from tests.support.work import calls

SIZES = (1e4, 3e4, 1e5, 3e5, 1e6, 3e6)
TOKENS = (1e6, 4e6, 1.6e7, 6.4e7, 2.5e8)
TRUTH = {"E": 1.8, "A": 480.0, "alpha": 0.35, "B": 2100.0, "beta": 0.37}


def chinchilla(parameters: float, tokens: float) -> float:
    return TRUTH["E"] + TRUTH["A"] * parameters ** -TRUTH["alpha"] + TRUTH["B"] * tokens ** -TRUTH["beta"]


def points(*, noise: float = 0.0, seed: int = 0, repeats: int = 1) -> list[Point]:
    random = np.random.default_rng(seed)
    return [
        Point(
            parameters=size,
            tokens=tokens,
            loss=chinchilla(size, tokens) * float(np.exp(noise * random.standard_normal())),
            seed=repeat,
        )
        for size, tokens, repeat in itertools.product(SIZES, TOKENS, range(repeats))
    ]


def test_without_noise_all_five_parameters_are_found() -> None:
    law = fit(points(), name="chinchilla")
    assert law.figures() == pytest.approx(TRUTH, rel=1e-3)
    assert law.reached > 0.2 and not law.at_bound
    assert law.loss(parameters=1e8, tokens=1e10) == pytest.approx(chinchilla(1e8, 1e10), rel=1e-6)
    assert np.abs(log_residuals(points(), law)).max() < 1e-6


def test_the_other_two_laws() -> None:
    floor = [Point(parameters=n, tokens=1e6, loss=1.5 + 80 * n**-0.4) for n in SIZES]
    assert fit(floor, name="floor").figures() == pytest.approx({"E": 1.5, "A": 80, "alpha": 0.4}, rel=1e-3)
    power = [Point(parameters=n, tokens=1e6, loss=300 * n**-0.2) for n in SIZES]
    assert fit(power, name="power").figures() == pytest.approx({"A": 300, "alpha": 0.2}, rel=1e-6)


def test_a_wild_point_moves_the_fit_little() -> None:
    wild = points(noise=1e-4)
    wild[7] = Point(parameters=wild[7].parameters, tokens=wild[7].tokens, loss=1.5 * wild[7].loss)
    assert fit(wild, name="chinchilla").figures() == pytest.approx(TRUTH, rel=0.05)


def test_the_objective_is_half_a_square_and_beyond_the_limit_a_line() -> None:
    residual = HUBER_DELTA * np.array([[0.5, -3.0, 0.0]])
    assert _huber(residual, np.array([[1.0, 2.0, 1.0]])) == pytest.approx(HUBER_DELTA**2 * (0.125 + 2 * 2.5))


def test_points_without_a_floor_are_told() -> None:
    power = [Point(parameters=n, tokens=1e6, loss=300 * n**-0.2) for n in SIZES]
    assert fit(power, name="floor").at_bound


def test_the_optimal_size_is_where_the_law_is_lowest() -> None:
    law = fit(points(), name="chinchilla")
    best = law.optimal_parameters(1e15)
    at = {f: law.loss(parameters=f * best, tokens=1e15 / 6 / (f * best)) for f in (0.9, 1.0, 1.1)}
    assert at[1.0] < min(at[0.9], at[1.1])


@pytest.mark.slow
def test_copies_of_a_cell_are_drawn_together() -> None:
    """Three copies of every point say no more than one of each: every single draw finds the same law."""
    single = points(noise=0.005)
    law = fit(single, name="chinchilla", starts=60)
    once, thrice = (bootstrap(given, law, samples=50) for given in (single, single * 3))
    for one, other in zip(once, thrice, strict=True):
        assert other.figures() == pytest.approx(one.figures(), rel=0.01)


def test_intervals_are_of_the_middle() -> None:
    assert interval(list(range(101)), level=0.9) == pytest.approx((5.0, 95.0))


@pytest.mark.long
@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    repeats, covered = 40, {"E": 0, "alpha": 0, "beta": 0}
    for seed in range(repeats):
        noisy = points(noise=0.005, seed=seed)
        law = fit(noisy, name="chinchilla", starts=40)
        found = intervals(bootstrap(noisy, law, samples=100, seed=seed), level=0.9)
        for name in covered:
            covered[name] += found[name][0] <= TRUTH[name] <= found[name][1]
    assert all(0.8 <= count / repeats <= 1.0 for count in covered.values()), covered


@pytest.mark.slow
def test_all_starts_and_samples_are_fitted_at_once() -> None:
    many = points(noise=0.005, repeats=8)  # 240, as many as the best known published set
    law = fit(many, name="chinchilla", starts=300)
    assert calls(lambda: fit(many, name="chinchilla", starts=300)) < 80_000
    assert calls(lambda: bootstrap(many, law, samples=200)) < 80_000
