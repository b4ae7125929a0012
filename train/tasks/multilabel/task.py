"""Multi-label classification: any number of labels per sample, by binary cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import ArrayPart, Part, Spec, TableLabelsSpec
from lib.devices.base import send
from lib.errors import ConfigError
from lib.nn.precision import full_precision
from lib.plugins import NoOptions as Options
from train.tasks.base import (
    Figures,
    Forward,
    Sums,
    count_of,
    no_logits,
    pure,
    refuse_label_smoothing,
    requested_metrics,
    weighted_sum,
)
from train.tasks.classify.task import BY_ROWS, class_weights
from train.tasks.metrics import reported, row_figures, with_metrics

DATA = ("a table with several labels", (TableLabelsSpec,))
ALWAYS = ("micro_f1", "macro_f1")


def build(_: Options, spec: Spec, *, config: Config) -> MultiLabel:
    """Return the task. Raises ConfigError for label smoothing, and weights that do not fit the labels."""
    assert isinstance(spec, TableLabelsSpec)
    refuse_label_smoothing(config, "several labels", weights=True)
    return MultiLabel(
        pos_weight=class_weights(config, spec.classes), metrics=(*ALWAYS, *requested_metrics(config))
    )


def figures(_: Options, __: Spec) -> Figures:
    """Return the names of the figures."""
    return Figures(("loss", *ALWAYS), BY_ROWS, BY_ROWS)


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return a logit of each label, else ""."""
    assert isinstance(spec, TableLabelsSpec)
    return no_logits(returned, (rows,), spec.classes)


def naive_loss(_: Spec) -> float:
    """Return the loss of a probability of one half for every label."""
    return math.log(2)


def postprocess(outputs_NK: Tensor, spec: TableLabelsSpec) -> Tensor:
    """Return the probability of each label (N, labels)."""
    return full_precision(outputs_NK)[:, : spec.classes].sigmoid()


def predictions(
    spec: TableLabelsSpec, *, class_names: Sequence[str], top: int
) -> Callable[[npt.NDArray[np.float32]], dict[str, npt.NDArray[Any]]]:
    """Return the function from probabilities (N, labels) to the labels above one half, and each probability.

    Raises ConfigError for `top`.
    """
    if top:
        why = "each label of this run has an answer of its own"
        raise ConfigError(f"TOP={top} is for classes", why=why, todo="leave it out")
    names = [*class_names] or [*map(str, range(spec.classes))]

    def columns(probabilities_NK: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
        chosen = [
            " ".join(name for name, p in zip(names, row, strict=True) if p > 0.5) for row in probabilities_NK
        ]
        each = {f"p_{name}": p_N for name, p_N in zip(names, probabilities_NK.T, strict=True)}
        return {"prediction": np.array(chosen, object), **each}

    return columns


class MultiLabel:
    """Binary cross-entropy, the mean over the labels of a sample."""

    targets_per_sample = 1

    def __init__(self, *, pos_weight: Sequence[float] | None, metrics: Sequence[str]) -> None:
        """pos_weight: of the ones of each label; () for 1, None for balanced ones."""
        self.pos_weight, self.metrics = pos_weight, metrics

    def see_training(self, part: Part) -> None:
        """Balance the weights of ones: zeros / ones of the label, of which there is at least 1 each."""
        if self.pos_weight is None:
            assert isinstance(part, ArrayPart)
            ones_K = part.sample_targets.sum(axis=0, dtype=float)
            self.pos_weight = ((part.size - ones_K).clip(min=1) / ones_K.clip(min=1)).tolist()

    @pure
    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss."""
        return self._sums(full_precision(forward(batch.inputs)), batch)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss, and what the metrics need."""
        logits_NK = full_precision(forward(batch.inputs))
        return with_metrics(self._sums(logits_NK, batch), self.metrics, logits_NK, batch)

    def _sums(self, logits_NK: Tensor, batch: Batch) -> Sums:
        given, dtype = self.pos_weight, logits_NK.dtype
        weights_K = send(torch.tensor(given, dtype=dtype), logits_NK.device) if given else None
        loss_NK = F.binary_cross_entropy_with_logits(
            logits_NK, batch.targets.to(logits_NK.dtype), reduction="none", pos_weight=weights_K
        )
        return Sums(weighted_sum(loss_NK.mean(dim=1), batch), count_of(batch), {})

    def report(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return samples, loss, and F1: a label is predicted where its probability is above one half."""
        return {"samples": means["count"], "loss": means["loss"], **reported(means, self.metrics)}

    def row_figures(self, *rows: Tensor) -> dict[str, float]:
        """Return the requested metrics that need all rows; average_precision is mAP."""
        return row_figures(self.metrics, *rows)

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the negative loss."""
        return -evaluation["loss"]
