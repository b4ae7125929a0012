"""Classification against its formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.data.types import ArrayPart, Column, TableClassSpec
from lib.errors import ConfigError
from train.tasks.classify.task import Classify, predictions

ROWS, CLASSES = 7, 5


def batch_of(logits_NK: Tensor, weights: list[float] | None = None) -> Batch:
    labels_N = torch.arange(len(logits_NK)) % CLASSES
    return Batch(logits_NK, labels_N, None if weights is None else torch.tensor(weights))


def random_logits(dtype: torch.dtype = torch.float64) -> Tensor:
    return (5 * torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2))).to(dtype)


def same(images: Tensor) -> Tensor:
    return images


def smoothed_loss(logits: list[float], label: int, *, smoothing: float) -> float:
    """Cross-entropy against (1 - e) * one-hot + e / K (Szegedy et al. 2015, equation 4)."""
    log_sum = math.log(sum(math.exp(logit) for logit in logits))
    wanted = [(1 - smoothing) * (k == label) + smoothing / len(logits) for k in range(len(logits))]
    return -sum(share * (logit - log_sum) for share, logit in zip(wanted, logits, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_training_is_the_sum_of_smoothed_cross_entropies(smoothing: float) -> None:
    batch = batch_of(random_logits())
    sums = Classify(label_smoothing=smoothing).training(same, batch)
    rows = zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)
    expected = sum(smoothed_loss(logits, label, smoothing=smoothing) for logits, label in rows)
    assert float(sums.loss) == pytest.approx(expected, rel=1e-12)
    assert sums.count == ROWS and isinstance(sums.count, int), "known without asking the device"


def test_accuracy_counts_right_answers() -> None:
    logits_NK = torch.eye(CLASSES, dtype=torch.float64)[[0, 1, 2, 0, 0, 0, 1]].requires_grad_()
    sums = Classify(label_smoothing=0.0).training(same, batch_of(logits_NK))
    assert int(sums.metrics["accuracy"]) == 5
    assert sums.loss.requires_grad and not sums.metrics["accuracy"].requires_grad


def test_evaluation_has_no_smoothing_and_leaves_padding_out() -> None:
    weights = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    batch = batch_of(random_logits(), weights)
    kept = [row for row, weight in enumerate(weights) if weight]
    sums = Classify(label_smoothing=0.3).evaluation(same, batch)
    losses = [
        smoothed_loss(batch.inputs[row].tolist(), int(batch.targets[row]), smoothing=0.0) for row in kept
    ]
    assert float(sums.loss) == pytest.approx(sum(losses), rel=1e-12)
    assert float(sums.count) == len(kept)
    right = [int(batch.inputs[row].argmax()) == int(batch.targets[row]) for row in kept]
    assert float(sums.metrics["accuracy"]) == sum(right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_is_never_taken_in_half_precision(dtype: torch.dtype) -> None:
    logits_NK = random_logits(dtype)
    expected = Classify(label_smoothing=0.1).training(same, batch_of(logits_NK.float()))
    found = Classify(label_smoothing=0.1).training(same, batch_of(logits_NK))
    assert found.loss.dtype == torch.float32 and torch.equal(found.loss, expected.loss)
    weighted = Classify(label_smoothing=0.1).evaluation(same, batch_of(logits_NK, [1.0] * ROWS))
    assert weighted.loss.dtype == torch.float32


def test_class_weights_weigh_loss_and_count() -> None:
    """As torch's weighted mean, with smoothing too; the accuracy of an evaluation weighs samples alike."""
    weights_K, batch = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.25]).double(), batch_of(random_logits())
    task = Classify(label_smoothing=0.2, class_weights=weights_K.tolist(), classes=CLASSES)
    sums = task.training(same, batch)
    mean = torch.nn.CrossEntropyLoss(weights_K, label_smoothing=0.2)(batch.inputs, batch.targets)
    assert float(sums.loss / sums.count) == pytest.approx(float(mean), rel=1e-12)
    right_N = batch.inputs.argmax(dim=1) == batch.targets
    own_N = weights_K[batch.targets]
    assert {n: float(v) for n, v in sums.metrics.items()} == {
        "weighted_accuracy": float((right_N * own_N).sum())
    }
    padded = task.evaluation(same, batch_of(random_logits(), [1.0] * 4 + [0.0] * 3))
    means = {name: float(value / padded.count) for name, value in padded.metrics.items()}
    found = task.report({"count": float(padded.count), "loss": 1.0, **means})
    assert found == {"samples": 4, "loss": 1.0, "accuracy": pytest.approx(float(right_N[:4].sum() / 4))}


def test_balanced_weights_are_those_of_the_rows_that_are_trained_on() -> None:
    part = ArrayPart(np.zeros((6, 3), np.float32), np.array([0, 0, 0, 1, 2, 2]), rows=np.arange(4))
    task = Classify(class_weights=None, classes=3)
    task.see_training(part)
    assert task.class_weights == pytest.approx([4 / (3 * 3), 4 / 3, 4 / 3])


@pytest.mark.parametrize("class_weights", [(), (1.0, 2.0, 0.5, 3.0, 0.25)])
@pytest.mark.parametrize("padding", [0, 3])
def test_of_mixed_samples_each_label_counts_by_its_share(
    class_weights: tuple[float, ...], padding: int
) -> None:
    shares_N = torch.linspace(0, 1, ROWS)
    mixed = (torch.arange(ROWS) + 2) % CLASSES, shares_N
    batch = replace(batch_of(random_logits()), mixed=mixed)
    if padding:
        batch = replace(batch, weights=(torch.arange(ROWS) < ROWS - padding).float())
    sums = Classify(label_smoothing=0.2, class_weights=class_weights, classes=CLASSES).training(same, batch)
    loss, count, right, weights_K = 0.0, 0.0, 0.0, class_weights or (1.0,) * CLASSES
    for row, logits in enumerate(batch.inputs[: ROWS - padding].tolist()):
        share = float(shares_N[row])
        for label, part in ((int(batch.targets[row]), share), (int(mixed[0][row]), 1 - share)):
            one = torch.nn.functional.cross_entropy(
                torch.tensor([logits]).double(),
                torch.tensor([label]),
                torch.tensor(weights_K).double(),
                label_smoothing=0.2,
                reduction="sum",
            )
            loss, count = loss + part * float(one), count + part * weights_K[label]
            right += part * weights_K[label] * (logits.index(max(logits)) == label)
    assert float(sums.loss) == pytest.approx(loss, rel=1e-6)  # shares are in single precision
    assert float(sums.count) == pytest.approx(count, rel=1e-6)
    assert isinstance(sums.count, int) == (not class_weights and not padding)
    name = "weighted_accuracy" if class_weights else "accuracy"
    assert {name: float(sums.metrics[name])} == {name: pytest.approx(right, rel=1e-6)}


def test_a_share_of_one_is_a_sample_that_is_not_mixed() -> None:
    batch = batch_of(random_logits())
    mixed = replace(batch, mixed=(torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS)))
    task = Classify(label_smoothing=0.1)
    assert torch.allclose(task.training(same, mixed).loss, task.training(same, batch).loss, rtol=1e-12)


def test_of_the_likeliest_classes_no_more_are_given_than_there_are() -> None:
    spec = TableClassSpec(name="t", columns=(Column(name="x"),), classes=3)
    shares = np.array([[0.2, 0.5, 0.3]], np.float32)
    found = predictions(spec, class_names=("a", "b", "c"), top=3)(shares)
    assert [found[name][0] for name in ("prediction", "prediction_2", "prediction_3")] == ["b", "c", "a"]
    with pytest.raises(ConfigError, match="TOP=9 is more than the 3 classes of the run; give 3 at most, or"):
        predictions(spec, class_names=("a", "b", "c"), top=9)
