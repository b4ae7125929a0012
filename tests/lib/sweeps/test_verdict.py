"""Verdicts on paired differences: levels, power, and how often equal configurations are called different."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lib.errors import ConfigError, ToolkitError
from lib.runs.index import Row
from lib.sweeps.verdict import (
    LEVEL,
    Verdict,
    holm,
    judge,
    nominal_level,
    p_values,
    planned_looks,
    power,
    t_quantile,
)
from scripts import ab_power
from scripts.ab_power import (
    DRAWS,
    MAX_FALSE,
    MAX_FALSE_REAL,
    false_verdicts,
    judge_runs,
    real_false_verdicts,
    refuse,
)


@pytest.mark.parametrize(
    ("freedom", "probability", "t"),
    [(1, 0.975, 12.706), (2, 0.975, 4.303), (4, 0.975, 2.776), (7, 0.995, 3.499), (30, 0.95, 1.697)],
)
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, probability: float, t: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(t, abs=5e-4)


def test_the_t_test_is_that_of_the_textbook() -> None:
    differences = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]  # Student (1908): t = 4.062, p = 0.00283
    (p,) = p_values(np.array([differences]))
    assert p == pytest.approx(0.00283, abs=1e-5)


def test_no_p_value_is_below_0() -> None:
    means = np.geomspace(1, 1e3, 5000)[:, None]
    for pairs in (9, 13, 40):  # where a probability was rounded to more than 1
        assert p_values(means + np.linspace(-1, 1, pairs)).min() == 0, pairs


@pytest.mark.parametrize(
    ("differences", "higher", "word"),
    [
        ([0.0] * 5, True, "not shown"),  # the metric may be too coarse
        ([0.02, 0.021, 0.019, 0.022, 0.018], True, "better"),
        ([0.02, 0.021, 0.019, 0.022, 0.018], False, "worse"),
        ([-0.02, -0.021, -0.019, -0.022, -0.018], False, "better"),
        ([0.02, -0.021, 0.019, -0.022, 0.018], True, "not shown"),
        ([0.01] * 5, True, "not shown"),  # five equal signs are likely where there are two possible values
    ],
)
def test_four_words(differences: list[float], higher: bool, word: str) -> None:
    assert judge(differences, [5], higher_is_better=higher).word == word


def test_identical_are_runs_whose_metrics_are_all_equal() -> None:
    assert judge([0.0] * 5, [5], higher_is_better=True, all_equal=True).word == "identical"


def test_zeros_that_had_a_verdict_would_be_false_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert false_verdicts("70 % zeros", (3,), trials=2000) <= MAX_FALSE

    def hasty(*given: Any, **options: Any) -> Verdict:
        return judge(*given, **options, all_equal=True)

    monkeypatch.setattr(ab_power, "judge", hasty)
    assert false_verdicts("70 % zeros", (3,), trials=2000) > 0.3


def test_the_interval_and_the_p_value_agree() -> None:
    random = np.random.default_rng(7)
    for _ in range(50):
        verdict = judge(random.standard_normal(5) + 1.0, [5], higher_is_better=True)
        assert (verdict.word != "not shown") == (not verdict.low <= 0 <= verdict.high)
        assert verdict.low <= verdict.mean <= verdict.high


def test_a_number_of_pairs_that_is_no_look_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 pairs are none of the looks 3 5"):
        judge([0.1] * 4, [3, 5], higher_is_better=True)


def test_one_look_has_the_whole_level_and_more_looks_share_it() -> None:
    assert nominal_level((5,)) == LEVEL
    assert LEVEL / 4 < nominal_level((3, 5, 8, 12)) < nominal_level((5, 8)) < LEVEL


def test_holm_is_that_of_the_textbook() -> None:
    assert holm([]) == []
    assert holm([0.04]) == [0.04]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_power_of_five_pairs() -> None:
    assert power(2.0, (5,)) == pytest.approx(0.91, abs=0.01)
    assert power(1.0, (5,)) == pytest.approx(0.40, abs=0.015)


@pytest.mark.parametrize("looks", [(3,), (5,), (3, 5, 8)])
@pytest.mark.parametrize("name", DRAWS)
def test_equal_configurations_are_seldom_called_different(name: str, looks: tuple[int, ...]) -> None:
    assert false_verdicts(name, looks, trials=5000) <= MAX_FALSE + 0.005


def test_equal_runs_are_seldom_called_different() -> None:
    values = np.random.default_rng(5).standard_t(3, 40).tolist()
    assert 0.01 < real_false_verdicts(values) <= MAX_FALSE_REAL
    split = [0.0] * 5 + [1.0] * 35  # too coarse for five pairs
    assert real_false_verdicts(split) == 0


@pytest.mark.parametrize("change", [{}, {"LEARNING_RATE": 0.2}])
def test_runs_that_differ_in_more_than_their_seeds_are_refused(change: dict[str, float]) -> None:
    row = Row(**dict.fromkeys(Row.__slots__, ()) | {"metrics": {}})  # type: ignore[arg-type]
    rows = [
        dataclasses.replace(row, values={"SEED": seed, "LEARNING_RATE": 0.1}, metrics={"loss": 1.0 / seed})
        for seed in range(1, 21)
    ]
    assert judge_runs(rows) <= MAX_FALSE_REAL
    rows[3] = dataclasses.replace(rows[3], values={**rows[3].values, **change})
    with pytest.raises(ConfigError, match="differ in more than their seeds"):
        judge_runs(rows if change else rows[:-1])
    with pytest.raises(ToolkitError, match=r"7\.10% false verdicts are more than 7\.0%"):
        refuse(0.071, MAX_FALSE_REAL)


def test_without_the_sign_flip_test_coarse_differences_are_called_different() -> None:
    draws = DRAWS["-1 or 1"](np.random.default_rng(0), (4000, 5))
    equal = np.abs(draws.sum(axis=1)) == 5
    assert equal.mean() > MAX_FALSE and (p_values(draws)[equal] > LEVEL).all()


def test_pairs_that_exist_count_as_looks() -> None:
    assert planned_looks([5]) == (5,)
    assert planned_looks([8], reused=5) == (3, 5, 8)
    assert planned_looks([5], reused=5) == (3, 5)
    assert planned_looks([3, 8], reused=4) == (3, 4, 8)
    assert planned_looks([3], reused=2) == (2, 3) and planned_looks([3], reused=1) == (3,)


@pytest.mark.parametrize("requested", [[], [1], [5, 3], [5, 5]])
def test_looks_ascend_from_two(requested: list[int]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        planned_looks(requested)
