"""Exhibits of a regression: predictions against targets, and the rows with the largest errors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lib.data.types import Dataset, TableSpec, row_text
from lib.reports.page import Block, curve, table
from train.job import Job, evaluation_outputs

SHOWN = 12  # rows with the largest errors
BINS = 15  # of predictions, with equally many rows


def exhibits(job: Job, dataset: Dataset, _: Iterator[int]) -> list[Block]:
    """Return, of each target, its mean by predicted value, and the rows with the largest errors."""
    spec = dataset.spec
    assert isinstance(spec, TableSpec)
    predicted_NK, targets_NK = predict(job)
    blocks = []
    for number, column in enumerate(spec.targets):
        predicted_N, targets_N = (
            values[:, number] * column.std + column.mean for values in (predicted_NK, targets_NK)
        )
        blocks.append(_by_prediction(column.name, predicted_N, targets_N))
        largest = np.abs(predicted_N - targets_N).argsort()[::-1][:SHOWN]
        inputs = dataset.test.take(largest)[0]
        pairs = ((f"{predicted_N[row]:.6g}", f"{targets_N[row]:.6g}") for row in largest)
        rows = [(row_text(spec.columns, own), *pair) for own, pair in zip(inputs, pairs, strict=True)]
        blocks.append(table(f"Largest errors of {column.name}", ("row", "predicted", "true"), rows))
    return blocks


def predict(job: Job) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return predictions and targets (N, K) of the evaluation part in its order, in standard deviations."""
    parts = [[values.double().cpu().numpy() for values in pair] for pair in evaluation_outputs(job)]
    predicted, targets = (np.concatenate(column) for column in zip(*parts, strict=True))
    return predicted, targets


def _by_prediction(
    name: str, predicted_N: npt.NDArray[np.float64], targets_N: npt.NDArray[np.float64]
) -> Block:
    """Return the mean target of rows with about the same prediction."""
    order = predicted_N.argsort()
    points = [
        (float(predicted_N[rows].mean()), float(targets_N[rows].mean()))
        for rows in np.array_split(order, min(BINS, len(order)))
    ]
    ends = points[0][0], points[-1][0]
    lines = {"model": points, "predicted = true": [(ends[0], ends[0]), (ends[1], ends[1])]}
    note = f"Rows in {len(points)} bins of equal size by their prediction."
    return curve(f"True and predicted {name}", lines, x=f"predicted {name}", y=f"true {name}", note=note)
