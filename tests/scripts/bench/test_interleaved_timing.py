"""Rounds of what is compared, one after the other."""

from __future__ import annotations

import pytest

from scripts.bench.interleaved_timing import interleaved


def test_rounds_take_turns_and_warm_up_does_not_count() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    runs = {"a": lambda steps: run("a", 0.1 * steps), "b": lambda steps: run("b", 0.5 * steps)}
    steps, seconds = interleaved(runs, rounds=2, round_seconds=2.0, warm_up=3)
    assert steps == 4 and "".join(order) == "ab" + "ab" + "abab"
    assert seconds == {"a": [pytest.approx(0.1)] * 2, "b": [pytest.approx(0.5)] * 2}
