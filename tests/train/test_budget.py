"""Budgets in epochs, steps and seconds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.configs import make_config
from train.job import Budget, budget_of


def budget(*, train_size: int = 1000, effective_batch: int = 100, **changes: Any) -> Budget:
    unset = {"num_epochs": None, "max_steps": None, "max_seconds": None}
    config = make_config("lenet5", **(unset | changes))
    return budget_of(config, train_size=train_size, effective_batch=effective_batch)


@pytest.mark.parametrize(
    ("epochs", "train_size", "effective_batch", "steps"),
    [(1, 1000, 100, 10), (3, 40, 16, 8), (10, 60_000, 512, 1172), (1, 10, 512, 1), (2, 7, 7, 2)],
)
def test_epochs_are_the_nearest_number_of_steps(
    epochs: int, train_size: int, effective_batch: int, steps: int
) -> None:
    found = budget(budget="epochs", num_epochs=epochs, train_size=train_size, effective_batch=effective_batch)
    assert found == Budget(total_steps=steps, total_seconds=None)
    seen = steps * effective_batch
    assert steps == 1 or abs(seen - epochs * train_size) <= effective_batch / 2


def test_steps_and_seconds_are_taken_as_they_are() -> None:
    assert budget(budget="steps", max_steps=7) == Budget(total_steps=7, total_seconds=None)
    assert budget(budget="seconds", max_seconds=90) == Budget(total_steps=None, total_seconds=90.0)


@pytest.mark.parametrize("total", [1, 2, 7, 1000])
def test_steps_are_made_to_the_last(total: int) -> None:
    found = budget(budget="steps", max_steps=total)
    steps = 0
    while not found.spent(step=steps, seconds=1e9):
        steps += 1
    assert steps == total
    fractions = [found.fraction(step=step, seconds=0.0) for step in range(total + 1)]
    assert fractions == sorted(set(fractions)) and fractions[0] == 0 and fractions[-1] == 1
    assert found.fraction(step=total, seconds=0.0) == 1.0


def test_seconds_are_spent_after_a_step_at_least() -> None:
    found = budget(budget="seconds", max_seconds=10)
    assert not found.spent(step=0, seconds=100.0)
    assert not found.spent(step=10**9, seconds=9.99)
    assert found.spent(step=1, seconds=10.0)
    assert [found.fraction(step=5, seconds=seconds) for seconds in (0.0, 2.5, 10.0, 25.0)] == [0, 0.25, 1, 1]
