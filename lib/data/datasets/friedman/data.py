"""Friedman's table: a smooth function of five of ten uniform numbers, with Gaussian noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lib.data.datasets.files import DataLocation
from lib.data.types import ArrayPart, Column, Dataset, TableSpec
from lib.plugins import NoOptions as Options
from lib.rng import key, uniform

__all__ = ["Options", "describe", "open_set"]

SIZES = {"train": 4000, "test": 1000}
INPUTS = 10
NOISE = 1.0  # standard deviation


def rows(part: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return inputs (N, 10) in [0, 1) and targets (N,) of a part (Friedman 1991, equation 61)."""
    x_NF = uniform(key("friedman", part), (SIZES[part], INPUTS)).astype(np.float64)
    # Twelve uniform numbers less 6 have mean 0 and variance 1, and nothing that differs between machines.
    noise_N = uniform(key("noise", part), (SIZES[part], 12)).astype(np.float64).sum(axis=1) - 6
    wave_N = 10 * np.sin(np.pi * x_NF[:, 0] * x_NF[:, 1])
    linear_N = 10 * x_NF[:, 3] + 5 * x_NF[:, 4]
    return x_NF, wave_N + 20 * (x_NF[:, 2] - 0.5) ** 2 + linear_N + NOISE * noise_N


def open_set(_: Options, location: DataLocation) -> Dataset:  # noqa: ARG001
    """Generate the table."""
    (x_NF, y_N), test = rows("train"), rows("test")
    columns = tuple(Column.of_numbers(f"x{number}", x_N) for number, x_N in enumerate(x_NF.T))
    target = Column.of_numbers("y", y_N)
    spec = TableSpec(name="friedman", columns=columns, targets=(target,), synthetic=True)
    train, evaluation = (
        ArrayPart(
            np.stack([column.normalised(x) for column, x in zip(columns, inputs.T, strict=True)], axis=1),
            target.normalised(targets)[:, None],
        )
        for inputs, targets in ((x_NF, y_N), test)
    )
    source = f"friedman: {train.size} + {evaluation.size} rows of {INPUTS} numbers, generated, synthetic"
    return Dataset(spec, train, evaluation, source)


describe = open_set  # it takes milliseconds
