"""Friedman's table: its formula, its noise, and the R2 that the noise allows."""

from __future__ import annotations

import numpy as np

from lib.data.datasets.friedman.data import NOISE, rows
from tests.support.datasets import opened


def test_the_target_is_the_formula_with_noise_of_deviation_1() -> None:
    x, y = rows("train")
    formula = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    noise = y - formula
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - NOISE) < 0.05
    assert 0.955 < 1 - noise.var() / y.var() < 0.965  # as the help says
    assert abs(np.corrcoef(noise, formula)[0, 1]) < 0.05


def test_inputs_and_targets_are_normalised_by_the_training_part() -> None:
    dataset = opened("friedman")
    inputs, targets = dataset.train.take()
    assert inputs.shape == (4000, 10) and targets.shape == (4000, 1) and inputs.dtype == np.float32
    for values in (inputs, targets):
        assert np.abs(values.mean(axis=0)).max() < 1e-5 and np.abs(values.std(axis=0) - 1).max() < 1e-5
    column, (x, _) = dataset.spec.columns[3], rows("test")  # type: ignore[attr-defined]
    found, _ = dataset.test.take()
    assert np.allclose(found[:, 3] * column.std + column.mean, x[:, 3], atol=1e-6)
