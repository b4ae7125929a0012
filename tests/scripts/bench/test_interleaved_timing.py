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
    assert steps == 4 and "".join(order) == "ab" + "ab" + "abab"
    assert seconds == {"a": [pytest.approx(0.1)] * 2, "b": [pytest.approx(0.5)] * 2}


def test_a_table_has_rates_over_the_first_and_says_what_is_undecided() -> None:
    seconds = {"one": [1.0, 1.0, 1.2], "twice": [0.5, 0.5, 0.6], "about": [1.1, 0.9, 1.2]}
    head, *rows, foot = table(seconds, note="4 steps")
    assert head.split() == ["4", "steps", "minimum", "median", "rate", "by", "medians"]
    assert [row.split()[0] for row in rows] == ["one", "twice", "about"]
    assert rows[1].split()[-2:] == ["2.000", "2.000"], "half the time is twice the rate"
    assert rows[2].endswith("undecided") and not rows[1].endswith("undecided")
    assert foot.startswith("3 interleaved rounds; load of the machine")


def test_one_round_decides_nothing() -> None:
    assert is_undecided([1.0], [0.5]) and not is_undecided([1.0, 1.0], [0.5, 0.5])
    assert not is_undecided([1.0, 1.0], [2.0, 3.0])
