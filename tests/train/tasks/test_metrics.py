"""Metrics of labels against their definitions, counted row by row; and rows of several ranks in order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.devices.base import Backend
from train.tasks.base import Sums, Totals
from train.tasks.classify.task import REQUESTED, Classify
from train.tasks.metrics import BINS, average_precision, f1, macro_f1, roc_auc, row_figures, with_metrics

RNG = np.random.default_rng(3)
ROWS, CLASSES = 60, 7
LOGITS = torch.tensor(RNG.normal(size=(ROWS, CLASSES)) * 2).round(decimals=1)  # with ties
LABELS = torch.tensor(RNG.integers(0, CLASSES, ROWS))


def same(inputs: Tensor) -> Tensor:
    return inputs


def report_of(*cuts: slice, weights: Tensor | None = None, **options: Any) -> dict[str, float]:
    """Figures of an evaluation in batches of these rows."""
    task, totals, backend = Classify(metrics=REQUESTED, **options), Totals(), Backend("cpu")
    for cut in cuts:
        own = None if weights is None else weights[cut]
        totals.add(task.evaluation(same, Batch(LOGITS[cut], LABELS[cut], own)))
    rows = totals.rows(backend)
    assert rows is not None
    return task.report(totals.means(backend)) | task.row_figures(*rows)


def area_by_pairs(scores: list[float], actual: list[bool]) -> float:
    positive = [score for score, is_one in zip(scores, actual, strict=True) if is_one]
    negative = [score for score, is_one in zip(scores, actual, strict=True) if not is_one]
    won = sum((one > other) + (one == other) / 2 for one in positive for other in negative)
    return won / (len(positive) * len(negative))


def precision_by_thresholds(scores: list[float], actual: list[bool]) -> float:
    area, recalled = 0.0, 0
    for threshold in sorted({*scores}, reverse=True):
        taken = [is_one for score, is_one in zip(scores, actual, strict=True) if score >= threshold]
        area += (sum(taken) - recalled) / sum(actual) * sum(taken) / len(taken)
        recalled = sum(taken)
    return area


def test_figures_are_those_of_their_definitions() -> None:
    found, shares = report_of(slice(0, ROWS)), LOGITS.softmax(dim=1).numpy()
    labels, predicted = LABELS.tolist(), LOGITS.argmax(dim=1).tolist()
    pairs = [*zip(labels, predicted, strict=True)]
    assert found["accuracy"] == pytest.approx(sum(label == guess for label, guess in pairs) / ROWS)
    each = []
    for k in range(CLASSES):
        right = sum(label == guess == k for label, guess in pairs)
        precision, recall = (right / max(1, sum(pair[at] == k for pair in pairs)) for at in (1, 0))
        each.append(2 * precision * recall / (precision + recall) if right else 0.0)
    assert found["macro_f1"] == pytest.approx(sum(each) / CLASSES)
    above = [sum(row > row[label]) for row, label in zip(LOGITS.numpy(), labels, strict=True)]
    assert found["top5_accuracy"] == pytest.approx(sum(place < 5 for place in above) / ROWS, abs=2 / ROWS)
    gap = 0.0
    for number in range(BINS):
        own = [i for i in range(ROWS) if number / BINS <= shares[i].max() < (number + 1) / BINS]
        gap += abs(sum(shares[i].max() - (labels[i] == predicted[i]) for i in own)) / ROWS
    assert found["calibration_error"] == pytest.approx(gap)
    logs = LOGITS.log_softmax(dim=1)
    columns = [(logs[:, k].tolist(), (k == LABELS).tolist()) for k in range(CLASSES)]
    assert found["roc_auc"] == pytest.approx(np.mean([area_by_pairs(*column) for column in columns]))
    expected = np.mean([precision_by_thresholds(*column) for column in columns])
    assert found["average_precision"] == pytest.approx(expected)


@pytest.mark.parametrize("options", [{}, {"class_weights": (1.0, 2.0, 0.5, 4.0, 1.5, 3.0, 0.25)}])
def test_they_do_not_depend_on_how_the_rows_are_split(options: dict[str, Any]) -> None:
    """Class weights weigh the loss, and nothing else."""
    whole = report_of(slice(0, ROWS), **options)
    assert report_of(*(slice(at, at + 12) for at in range(0, ROWS, 12)), **options) == pytest.approx(
        whole, rel=1e-12
    )
    plain = report_of(slice(0, ROWS))
    assert (whole["loss"] != pytest.approx(plain["loss"])) == bool(options)
    assert whole | {"loss": 0.0} == pytest.approx(plain | {"loss": 0.0}, rel=1e-12)


def test_rows_of_padding_do_not_count() -> None:
    weights = (torch.arange(ROWS) < 41).double()
    assert report_of(slice(0, ROWS), weights=weights) == pytest.approx(report_of(slice(0, 41)), rel=1e-12)


def test_two_classes_are_judged_by_the_second_and_nan_is_told() -> None:
    scores, labels = LOGITS[:, :2].log_softmax(dim=1), LABELS % 2
    second = (scores[:, 1].tolist(), (labels == 1).tolist())
    found = row_figures(("average_precision", "roc_auc", "macro_f1"), scores, labels)
    assert [*found] == ["average_precision", "roc_auc"]
    assert found["average_precision"] == pytest.approx(precision_by_thresholds(*second))
    assert found["roc_auc"] == pytest.approx(area_by_pairs(*second))
    broken = scores.masked_fill(torch.arange(ROWS)[:, None] == 5, math.nan)
    assert all(math.isnan(value) for value in row_figures(("roc_auc",), broken, labels).values())


def test_labels_without_rows_are_left_out() -> None:
    counts = torch.tensor([[2.0, 0.0, 0.0], [4.0, 0.0, 0.0], [2.0, 0.0, 3.0]])
    assert f1(counts).tolist() == pytest.approx([2 / 3, math.nan, 0.0], nan_ok=True)
    assert macro_f1(counts) == pytest.approx(1 / 3)
    none = torch.zeros(4, dtype=torch.bool)
    assert math.isnan(roc_auc(torch.rand(4), none)) and math.isnan(average_precision(torch.rand(4), none))
    targets = torch.stack([LABELS % 2, torch.zeros_like(LABELS)], dim=1).double()
    only = row_figures(("roc_auc",), LOGITS[:, :2], targets)["roc_auc"]
    assert only == pytest.approx(area_by_pairs(LOGITS[:, 0].tolist(), (LABELS % 2 == 1).tolist()))


def test_several_labels_have_thresholds_of_their_own() -> None:
    targets = torch.tensor(RNG.integers(0, 2, (ROWS, 3))).double()
    sums = with_metrics(Sums(torch.zeros(()), ROWS, {}), ("macro_f1",), LOGITS[:, :3], Batch(LOGITS, targets))
    right, predicted, actual = sums.metrics["label_counts"]
    assert actual.tolist() == targets.sum(dim=0).tolist() and not sums.rows
    assert predicted.tolist() == (LOGITS[:, :3] > 0).sum(dim=0).tolist()
    assert right.tolist() == ((LOGITS[:, :3] > 0) & (targets > 0)).sum(dim=0).tolist()


class OneOfThree(Backend):
    """Rank 0 of three; the others have what follows its rows."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, tensor + 4, tensor + 8]


def test_rows_of_all_ranks_are_in_the_order_of_the_samples() -> None:
    totals = Totals()
    for batch in range(2):  # of four rows on each of three ranks
        numbers = torch.arange(4) + 12 * batch
        totals.add(Sums(torch.zeros(()), 4, {}, (numbers, numbers + 1)))
    rows = totals.rows(OneOfThree("cpu"))
    assert rows is not None and rows[0].tolist() == [*range(24)]
    assert Totals.rows(plain(), Backend("cpu")) is None


def plain() -> Totals:
    totals = Totals()
    totals.add(Sums(torch.zeros(()), 4, {}))
    return totals


def test_sums_may_be_arrays() -> None:
    totals = Totals()
    for count in (3, torch.tensor(1)):
        totals.add(Sums(torch.tensor(2.0), count, {"each": torch.tensor([[1.0, 2.0], [4.0, 0.0]])}))
    means = totals.means(Backend("cpu"))
    assert means["loss"] == 1.0 and means["each"].tolist() == [[0.5, 1.0], [2.0, 0.0]]
