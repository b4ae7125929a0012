"""Metrics against scikit-learn and torchmetrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lib.data.loader import Batch
from lib.devices.base import Backend
from train.tasks.base import Totals
from train.tasks.classify.task import REQUESTED, Classify
from train.tasks.multilabel.task import MultiLabel

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
torchmetrics = pytest.importorskip("torchmetrics.functional", reason="torchmetrics is not installed")
RNG = np.random.default_rng(0)


def found_by(task: Classify | MultiLabel, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    totals, backend = Totals(), Backend("cpu")
    for rows in torch.arange(len(logits)).split(100):
        totals.add(task.evaluation(lambda inputs: inputs, Batch(logits[rows], targets[rows])))
    rows_of_all = totals.rows(backend)
    assert rows_of_all is not None
    return task.report(totals.means(backend)) | task.row_figures(*rows_of_all)


@pytest.mark.parametrize("classes", [2, 7])
def test_of_classes(classes: int) -> None:
    logits = torch.tensor(RNG.normal(size=(600, classes)))  # probabilities tie otherwise than logarithms
    labels = torch.tensor(RNG.integers(0, classes, 600))
    found, shares = found_by(Classify(metrics=REQUESTED), logits, labels), logits.softmax(dim=1)
    scores = shares[:, 1] if classes == 2 else shares
    one_hot = labels if classes == 2 else torch.nn.functional.one_hot(labels)
    expected = {
        "macro_f1": sklearn.f1_score(labels, logits.argmax(dim=1), average="macro"),
        "roc_auc": sklearn.roc_auc_score(labels, scores, multi_class="ovr"),
        "average_precision": sklearn.average_precision_score(one_hot, scores),
        "accuracy": sklearn.accuracy_score(labels, logits.argmax(dim=1)),
    }
    kind = {"task": "multiclass", "num_classes": classes}
    error = torchmetrics.calibration_error(shares, labels, n_bins=15, norm="l1", **kind)
    assert found["calibration_error"] == pytest.approx(float(error), abs=1e-6)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    if classes > 5:
        top = torchmetrics.accuracy(shares, labels, top_k=5, average="micro", **kind)
        assert found["top5_accuracy"] == pytest.approx(float(top), abs=1e-6)


def test_of_several_labels() -> None:
    logits = torch.tensor(RNG.normal(size=(600, 4))).round(decimals=1)
    targets = torch.tensor(RNG.integers(0, 2, (600, 4))).double()
    names = ("micro_f1", "macro_f1", "roc_auc", "average_precision")
    found = found_by(MultiLabel(pos_weight=(), metrics=names), logits, targets)
    predicted = (logits > 0).long()
    assert found["micro_f1"] == pytest.approx(sklearn.f1_score(targets, predicted, average="micro"))
    assert found["macro_f1"] == pytest.approx(sklearn.f1_score(targets, predicted, average="macro"))
    assert found["roc_auc"] == pytest.approx(sklearn.roc_auc_score(targets, logits))
    assert found["average_precision"] == pytest.approx(sklearn.average_precision_score(targets, logits))
