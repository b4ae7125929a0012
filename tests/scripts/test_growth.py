"""Costs that grow with what a user has: measured by one command, and linear in the points of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.sweeps.experiment import read_experiment
from lib.sweeps.result_table import best_of, table
from scripts import growth


class Counted(list[Any]):
    """A list that counts how often it is gone through."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return super().__iter__()


def test_a_table_of_points_goes_through_the_results_a_fixed_number_of_times(tmp_path: Path) -> None:
    passes = []
    for points in (5, 50):
        experiment = read_experiment(growth.sweep_of(points, tmp_path))
        results = Counted(growth.results_of(experiment))
        assert len(table(experiment, results)) == points + 1 and len(results) == 3 * points
        assert best_of(experiment, results)[1] == points
        passes.append(results.passes)
    assert passes[0] == passes[1] < 10


@pytest.mark.slow
def test_every_cost_is_measured_at_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tuple((case, 20) for case, _ in growth.SIZES)
    monkeypatch.setattr(growth, "SIZES", sizes)
    monkeypatch.setattr(growth.gc, "collect", lambda: 0)  # of what all other tests have left
    rows = growth.measured(rounds=1)
    assert len(rows) == len({name for name, *_ in rows}) == 11
    assert all(size == 20 and low >= 0 < high for _, size, low, high in rows)
    lines = growth.page([("read", 1_000, 0.5, 5.0)], "a machine").splitlines()
    assert lines[-1] == "| read | 1,000 | 0.5000 | 5.0000 | 10.0 |" and "on a machine." in lines[-5]
