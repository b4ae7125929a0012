"""Regression: numbers, predicted in standard deviations of the training part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import Dataset, Spec, TableSpec
from lib.errors import ConfigError
from lib.nn.precision import full_precision
from train.tasks.base import (
    Columns,
    Figures,
    Forward,
    Sums,
    count_of,
    pure,
    refuse_label_smoothing,
    weighted_sum,
)

SELECTS = "MODEL_PREDICTS_ROWS"
DATA = ("a table with numbers to predict", (TableSpec,))
_SUMS = ("absolute", "square", "target", "target_square")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of train/tasks/regress/Kconfig."""

    loss: Literal["mse", "mae", "huber"]
    huber_delta: float


def build(options: Options, spec: Spec, *, config: Config) -> Regress:
    """Return the task. Raises ConfigError for label smoothing."""
    assert isinstance(spec, TableSpec)
    refuse_label_smoothing(config, "numbers")
    return Regress(options, spec)


def figures(_: Options, spec: Spec) -> Figures:
    """Return the names of the figures: of several targets those of each, too."""
    assert isinstance(spec, TableSpec)
    names = [column.name for column in spec.targets]
    of_each = [f"{kind}_{name}" for name in names for kind in ("r2", "mae", "rmse")]
    return Figures(("loss", "r2", *(of_each if len(names) > 1 else ("mae", "rmse"))))


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return a number per target, else ""."""
    assert isinstance(spec, TableSpec)
    shape = (rows, len(spec.targets))
    if isinstance(returned, Tensor) and returned.is_floating_point() and returned.shape == shape:
        return ""
    return f"not floating-point numbers {shape}"


def postprocess(outputs_NK: Tensor, spec: TableSpec) -> Tensor:
    """Return the numbers in the units of the targets, float64 (N, targets)."""
    std_K, mean_K = (
        outputs_NK.new_tensor([getattr(column, name) for column in spec.targets], dtype=torch.float64)
        for name in ("std", "mean")
    )
    return outputs_NK.double() * std_K + mean_K


def predictions(
    spec: TableSpec, *, class_names: Sequence[str], top: int
) -> Callable[[npt.NDArray[np.float64]], Columns]:
    """Return the function from numbers (N, targets) to a column per target. Raises ConfigError for `top`."""
    assert not class_names
    if top:
        why = "this run predicts numbers"
        raise ConfigError(f"TOP={top} is a number of classes", why=why, todo="leave it out")
    names = [f"predicted_{column.name}" for column in spec.targets]
    return lambda numbers_NK: dict(zip(names, numbers_NK.T, strict=True))


class Regress:
    """Squared, absolute or Huber's error, the mean over the targets of a sample."""

    targets_per_sample = 1

    def __init__(self, options: Options, spec: TableSpec) -> None:
        losses: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "mae": F.l1_loss}
        losses["huber"] = partial(F.huber_loss, delta=options.huber_delta)
        self._loss, self._columns = losses[options.loss], spec.targets

    @pure
    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss."""
        predicted_NK, targets_NK = self._pairs(forward, batch)
        return Sums(self._summed(predicted_NK, targets_NK, batch), count_of(batch), {})

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the weighted loss, and per target the sums from which `report` has its figures."""
        predicted_NK, targets_NK = self._pairs(forward, batch)
        error_NK = (predicted_NK - targets_NK).detach()
        columns = zip(_SUMS, (error_NK.abs(), error_NK**2, targets_NK, targets_NK**2), strict=True)
        sums = {
            f"{name}_{number}": weighted_sum(values_NK[:, number], batch)
            for name, values_NK in columns
            for number in range(len(self._columns))
        }
        return Sums(self._summed(predicted_NK, targets_NK, batch), count_of(batch), sums)

    @staticmethod
    def _pairs(forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        predicted_NK = full_precision(forward(batch.inputs))
        return predicted_NK, batch.targets.to(predicted_NK.dtype)

    def _summed(self, predicted_NK: Tensor, targets_NK: Tensor, batch: Batch) -> Tensor:
        return weighted_sum(self._loss(predicted_NK, targets_NK, reduction="none").mean(dim=1), batch)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return samples, loss, R2 (the mean over targets), and MAE and RMSE in the units of the targets.

        Of several targets R2, MAE and RMSE of each follow, with its name. R2 is 1 - (sum of squared errors) /
        (sum of squared deviations of the targets from their mean): nan where they are all equal.
        """
        found = {"samples": means["count"], "loss": means["loss"], "r2": 0.0}
        for number, column in enumerate(self._columns):
            absolute, square, mean, mean_square = (means[f"{name}_{number}"] for name in _SUMS)
            variance = mean_square - mean**2
            # Of equal targets it is the rounding of sums in float32.
            r2 = 1 - square / variance if variance > 4e-7 * mean_square else math.nan
            found["r2"] += r2 / len(self._columns)
            named = {"mae": absolute * column.std, "rmse": math.sqrt(square) * column.std}
            if len(self._columns) > 1:
                named = {f"{name}_{column.name}": value for name, value in {"r2": r2, **named}.items()}
            found |= named
        return found

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the negative loss."""
        return -evaluation["loss"]


def naive_loss(_: Spec) -> None:
    """Return None: the loss of an untrained model depends on its first weights."""


def baseline(dataset: Dataset, **_: Any) -> str:
    """Return, as a line of text, the figures of the mean of the training targets as the prediction."""
    assert isinstance(dataset.spec, TableSpec)
    targets_NK = np.asarray(dataset.test.take()[1], np.float64)  # normalised: the mean of training is 0
    columns = zip(_SUMS, (abs(targets_NK), targets_NK**2, targets_NK, targets_NK**2), strict=True)
    sums = {f"{name}_{number}": float(mean) for name, of in columns for number, mean in enumerate(of.mean(0))}
    task = Regress(Options(loss="mse", huber_delta=1.0), dataset.spec)
    found = task.report({"count": len(targets_NK), "loss": float((targets_NK**2).mean()), **sums})
    listed = ", ".join(f"{name} {found[name]:.5g}" for name in found if name not in ("samples", "loss"))
    return f"Constant baseline: {listed} by predicting the mean of the training targets"
