"""Regression: losses and figures against NumPy, whatever the cut into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.data.types import ArrayPart, Column, Dataset, TableSpec
from train.tasks.base import Sums
from train.tasks.regress.task import Options, Regress, baseline, fault

COLUMNS = Column(name="price", mean=50.0, std=20.0), Column(name="area", mean=1.0, std=0.5)
RNG = np.random.default_rng(0)
TARGETS, PREDICTED = RNG.normal(size=(12, 2)), RNG.normal(size=(12, 2))


def task(*columns: Column, loss: str = "mse", delta: float = 1.0) -> Regress:
    spec = TableSpec(name="t", columns=(Column(name="x"),), targets=columns)
    return Regress(Options(loss=loss, huber_delta=delta), spec)  # type: ignore[arg-type]


def sums_of(regress: Regress, rows: slice, *, weights: Tensor | None = None, outputs: int = 2) -> Sums:
    predicted = torch.tensor(PREDICTED[rows, :outputs])
    batch = Batch(torch.zeros(len(predicted), 1), torch.tensor(TARGETS[rows, :outputs]), weights)
    return regress.evaluation(lambda _: predicted, batch)


def means_of(parts: list[Sums]) -> dict[str, float]:
    count = sum(float(part.count) for part in parts)
    names = parts[0].metrics
    found = {name: sum(float(part.metrics[name]) for part in parts) / count for name in names}
    return {"count": count, "loss": sum(float(part.loss) for part in parts) / count, **found}


def test_figures_are_those_of_the_units_of_the_data() -> None:
    regress = task(*COLUMNS)
    parts = [sums_of(regress, rows) for rows in (slice(0, 5), slice(5, 12))]
    report = regress.report(means_of(parts))
    error = PREDICTED - TARGETS
    r2 = 1 - (error**2).sum(axis=0) / ((TARGETS - TARGETS.mean(axis=0)) ** 2).sum(axis=0)
    assert report["samples"] == 12
    assert report["loss"] == pytest.approx((error**2).mean())
    assert report["r2"] == pytest.approx(r2.mean())
    for number, column in enumerate(COLUMNS):
        assert report[f"mae_{column.name}"] == pytest.approx(np.abs(error[:, number]).mean() * column.std)
        rmse = np.sqrt((error[:, number] ** 2).mean()) * column.std
        assert report[f"rmse_{column.name}"] == pytest.approx(rmse)
        assert report[f"r2_{column.name}"] == pytest.approx(r2[number])
    assert regress.score(report) == -report["loss"]


def test_a_single_target_has_short_names_and_rows_of_padding_do_not_count() -> None:
    regress = task(COLUMNS[0])
    weights = torch.tensor([1.0] * 8 + [0.0] * 4)
    padded = regress.report(means_of([sums_of(regress, slice(0, 12), weights=weights, outputs=1)]))
    assert padded == pytest.approx(regress.report(means_of([sums_of(regress, slice(0, 8), outputs=1)])))
    assert [*padded] == ["samples", "loss", "r2", "mae", "rmse"]


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_losses(loss: str) -> None:
    regress = task(*COLUMNS, loss=loss, delta=0.7)
    error = np.abs(PREDICTED - TARGETS)
    huber = np.where(error < 0.7, error**2 / 2, 0.7 * (error - 0.35))
    expected = {"mse": error**2, "mae": error, "huber": huber}[loss].mean()
    found = sums_of(regress, slice(0, 12))
    assert float(found.loss) / 12 == pytest.approx(expected)


def test_equal_targets_have_no_r2() -> None:
    regress = task(COLUMNS[0])
    means = {
        "count": 3.0,
        "loss": 1.0,
        "absolute_0": 1.0,
        "square_0": 1.0,
        "target_0": 2.0,
        "target_square_0": 4.0,
    }
    assert np.isnan(regress.report(means)["r2"])
    assert np.isnan(regress.report(means | {"target_square_0": 4.0000002})["r2"]), "of sums in float32"


def test_what_is_no_number_per_target_is_told() -> None:
    spec = TableSpec(name="t", columns=(Column(name="x"),), targets=COLUMNS)
    assert fault(torch.zeros(4, 2), spec, rows=4) == ""
    for wrong in (torch.zeros(4), torch.zeros(4, 1), torch.zeros(4, 2, dtype=torch.int64), "numbers"):
        assert fault(wrong, spec, rows=4) == "not floating-point numbers (4, 2)"


def test_the_baseline_has_the_figures_of_a_constant_prediction() -> None:
    """0 is the mean of the training targets; the evaluated rows have another one."""
    spec = TableSpec(name="t", columns=(Column(name="x"),), targets=COLUMNS)
    part = ArrayPart(np.zeros((12, 1), np.float32), TARGETS.astype(np.float32))
    dataset = Dataset(spec=spec, train=part, test=part, source="")
    regress = task(*COLUMNS)
    zeros = regress.evaluation(lambda _: torch.zeros(12, 2), Batch(torch.zeros(12, 1), torch.tensor(TARGETS)))
    report = regress.report(means_of([zeros]))
    line = baseline(dataset)
    assert line.startswith("Constant baseline: r2 -") and line.endswith("the mean of the training targets")
    for name in ("r2", "mae_price", "rmse_area"):
        assert f"{name} {report[name]:.4g}"[:-1] in line
