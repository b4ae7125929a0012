"""Several labels: the loss and its weights against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.data.types import ArrayPart, Column, TableLabelsSpec
from lib.devices.base import Backend
from lib.errors import ConfigError
from train.tasks.base import Totals
from train.tasks.multilabel.task import MultiLabel, fault, naive_loss, postprocess, predictions

RNG = np.random.default_rng(0)
LOGITS, TARGETS = torch.tensor(RNG.normal(size=(9, 3))), torch.tensor(RNG.integers(0, 2, (9, 3))).double()
SPEC = TableLabelsSpec(name="t", columns=(Column(name="x"),), classes=3)


def same(inputs: Tensor) -> Tensor:
    return inputs


def expected(weights: list[float], rows: int = 9) -> float:
    """The sum over rows of the mean over labels."""
    total = 0.0
    for logits, targets in zip(LOGITS[:rows].tolist(), TARGETS[:rows].tolist(), strict=True):
        for logit, target, weight in zip(logits, targets, weights, strict=True):
            share = 1 / (1 + math.exp(-logit))
            total -= (weight * math.log(share) if target else math.log(1 - share)) / 3
    return total


def test_a_one_weighs_as_told_and_padding_nothing() -> None:
    task, weights = MultiLabel(pos_weight=(2.0, 1.0, 0.5), metrics=()), torch.tensor([1.0] * 6 + [0.0] * 3)
    sums = task.training(same, Batch(LOGITS, TARGETS))
    assert float(sums.loss) == pytest.approx(expected([2.0, 1.0, 0.5]), rel=1e-12) and sums.count == 9
    padded = task.training(same, Batch(LOGITS, TARGETS, weights))
    assert float(padded.loss) == pytest.approx(expected([2.0, 1.0, 0.5], rows=6), rel=1e-12)
    assert float(padded.count) == 6


def test_balanced_weights_are_zeros_over_ones_of_the_rows_that_are_trained_on() -> None:
    targets = np.array([[1, 0, 1], [0, 0, 1], [0, 0, 1], [1, 1, 0]], np.float32)
    part = ArrayPart(np.zeros((4, 1), np.float32), targets, rows=np.array([0, 1, 2]))
    task = MultiLabel(pos_weight=None, metrics=())
    task.see_training(part)
    assert task.pos_weight == [2.0, 3.0, 1 / 3]  # none counts as one


def test_what_is_reported() -> None:
    task, totals = MultiLabel(pos_weight=(), metrics=("micro_f1", "macro_f1", "roc_auc")), Totals()
    totals.add(task.evaluation(same, Batch(LOGITS, TARGETS)))
    found = task.report(totals.means(Backend("cpu")))
    predicted = LOGITS > 0
    right, both = (predicted & (TARGETS > 0)).sum(), predicted.sum() + TARGETS.sum()
    assert [*found] == ["samples", "loss", "micro_f1", "macro_f1"]
    assert found["micro_f1"] == pytest.approx(float(2 * right / both))
    assert task.score(found) == -found["loss"] == pytest.approx(-expected([1.0] * 3) / 9)
    zeros = task.training(same, Batch(torch.zeros(4, 3), TARGETS[:4]))
    assert float(zeros.loss) / 4 == pytest.approx(naive_loss(SPEC))


def test_predictions_are_the_labels_above_one_half() -> None:
    shares = postprocess(torch.tensor([[2.0, -1.0, 0.5], [-1.0, -2.0, -3.0]]), SPEC)
    found = predictions(SPEC, class_names=("a", "b", "c"), top=0)(shares.numpy())
    assert found["prediction"].tolist() == ["a c", ""]
    assert found["p_b"] == pytest.approx(1 / (1 + np.exp([1.0, 2.0])))
    with pytest.raises(ConfigError, match=r"TOP=2 is for classes: each label .*; leave it out"):
        predictions(SPEC, class_names=("a", "b", "c"), top=2)


def test_what_is_no_logit_per_label_is_told() -> None:
    assert fault(torch.zeros(4, 3), SPEC, rows=4) == ""
    assert fault(torch.zeros(4, 2), SPEC, rows=4) == "not floating-point logits (4, 3)"
