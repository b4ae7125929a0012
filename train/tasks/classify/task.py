"""Classification: softmax cross-entropy against one label per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import LABELLED, Labelled, Spec
from lib.nn.precision import full_precision
from lib.plugins import NoOptions as Options
from train.tasks.base import Columns, Forward, Sums, count_of, no_logits, weighted_sum

DATA = ("images, texts or tables with labels", LABELLED)


def build(_: Options, spec: Spec, *, config: Config) -> Classify:
    """Return the task."""
    assert isinstance(spec, DATA[1])
    return Classify(label_smoothing=config.label_smoothing)


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return logits of the classes, else ""."""
    assert isinstance(spec, LABELLED)
    return no_logits(returned, (rows,), spec.classes)


def naive_loss(spec: Spec) -> float:
    """Return the cross-entropy of a uniform guess of the class."""
    assert isinstance(spec, LABELLED)
    return math.log(spec.classes)


def postprocess(outputs_NK: Tensor, spec: Labelled) -> Tensor:
    """Return the probabilities of the classes (N, classes)."""
    return full_precision(outputs_NK)[:, : spec.classes].softmax(dim=1)


def predictions(
    spec: Labelled, *, class_names: Sequence[str], top: int
) -> Callable[[npt.NDArray[np.float32]], Columns]:
    """Return the function from probabilities (N, classes) to the likeliest class and the probability of each.

    top: of this many classes, from the likeliest, instead of each.
    """
    names_K = np.array([*class_names] or [*map(str, range(spec.classes))], object)

    def columns(probabilities_NK: npt.NDArray[np.float32]) -> Columns:
        order_NK = (-probabilities_NK).argsort(axis=1, kind="stable")
        ranked_NK = np.take_along_axis(probabilities_NK, order_NK, axis=1)
        found: Columns = {"prediction": names_K[order_NK[:, 0]], "probability": ranked_NK[:, 0]}
        for place in range(1, min(top, len(names_K))):
            found[f"prediction_{place + 1}"] = names_K[order_NK[:, place]]
            found[f"probability_{place + 1}"] = ranked_NK[:, place]
        each = () if top else zip(names_K, probabilities_NK.T, strict=True)
        return found | {f"p_{name}": p_N for name, p_N in each}

    return columns


class Classify:
    """Cross-entropy with label smoothing (Szegedy et al. 2015, section 7)."""

    targets_per_sample = 1

    def __init__(self, *, label_smoothing: float) -> None:
        self.label_smoothing = label_smoothing

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the smoothed loss, and the number of correct predictions as "accuracy"."""
        return self._scores(forward, batch, label_smoothing=self.label_smoothing)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the weighted loss and accuracy without label smoothing."""
        return self._scores(forward, batch, label_smoothing=0.0)

    @staticmethod
    def _scores(forward: Forward, batch: Batch, *, label_smoothing: float) -> Sums:
        logits_NK = full_precision(forward(batch.inputs))
        # Without weights the sum is one kernel.
        reduction = "sum" if batch.weights is None else "none"
        loss = F.cross_entropy(logits_NK, batch.targets, reduction=reduction, label_smoothing=label_smoothing)
        correct_N = logits_NK.argmax(dim=1) == batch.targets
        return Sums(weighted_sum(loss, batch), count_of(batch), {"accuracy": weighted_sum(correct_N, batch)})

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return samples, loss and accuracy."""
        return {"samples": means["count"], "loss": means["loss"], "accuracy": means["accuracy"]}

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the accuracy."""
        return evaluation["accuracy"]
