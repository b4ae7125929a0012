"""Rounds of what is compared, one after the other."""

from __future__ import annotations

import pytest

from scripts.bench.interleaved_timing import interleaved, is_undecided, table


def test_rounds_take_turns_and_warm_up_does_not_count() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    runs = {"a": lambda steps: run("a", 0.1 * steps), "b": lambda steps: run("b", 0.5 * steps)}
    steps, seconds = interleaved(runs, rounds=2, round_seconds=2.0, warm_up=3)
    assert steps == 4 and "".join(order) == "ab" + "ab" + "abba", "each round begins with another"
    assert seconds == {"a": [pytest.approx(0.1)] * 2, "b": [pytest.approx(0.5)] * 2}


def test_a_table_has_rates_over_the_first_and_says_what_is_undecided() -> None:
    seconds = {"one": [1.0, 1.1, 1.2], "twice": [0.5, 0.55, 0.61], "about": [1.1, 0.9, 1.2]}
    head, *rows, foot = table(seconds, note="4 steps", load=2.25)
    assert head.split() == ["4", "steps", "minimum", "median", "rate", "by", "medians"]
    assert [row.split()[0] for row in rows] == ["one", "twice", "about"]
    assert rows[1].split()[-2:] == ["2.000", "2.000"], "half the time is twice the rate"
    assert rows[2].endswith("undecided") and not rows[1].endswith("undecided")
    assert foot == "3 interleaved rounds; load of the machine in the last minute 2.2"


def test_only_what_is_beyond_the_noise_of_the_rounds_is_decided() -> None:
    steady = [1.0, 1.01, 0.99, 1.0, 1.02, 1.0, 0.98]
    assert is_undecided([1.0], [0.5]), "one round shows no noise"
    assert not is_undecided(steady, [time * 1.05 for time in steady]), "slower in every round"
    noisy = [1.1, 0.97, 1.06, 0.95, 1.0, 1.08, 0.96]
    assert is_undecided(steady, noisy), "once faster, once slower"
    loaded = [1.0, 3.0, 9.0, 2.0, 27.0, 1.0, 5.0]
    factors = [0.9, 0.91, 0.9, 0.92, 0.9, 0.9, 0.91]
    other = [time * factor for time, factor in zip(loaded, factors, strict=True)]
    assert not is_undecided(loaded, other), "the load of a round is of both"
    lucky = [0.8, *(time * 1.1 for time in steady[1:])]
    assert is_undecided(steady, lucky), "the minimum is of one lucky round"
