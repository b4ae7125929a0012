"""Classification: softmax cross-entropy against one label per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import LABELLED, ArrayPart, Labelled, Part, Spec
from lib.devices.base import send
from lib.errors import ConfigError
from lib.nn.precision import full_precision
from lib.plugins import NoOptions as Options
from train.tasks.base import (
    Columns,
    Figures,
    Forward,
    Sums,
    count_of,
    no_logits,
    pure,
    requested_metrics,
    weighted_sum,
)

DATA = ("images, texts or tables with labels", LABELLED)
MIXES = True  # trains on `Batch.mixed`
BY_ROWS = ("roc_auc", "average_precision")
REQUESTED = ("top5_accuracy", "macro_f1", "calibration_error", *BY_ROWS)


def build(_: Options, spec: Spec, *, config: Config) -> Classify:
    """Return the task. Raises ConfigError for class weights that do not fit the classes."""
    assert isinstance(spec, DATA[1])
    return Classify(
        label_smoothing=config.label_smoothing,
        class_weights=class_weights(config, spec.classes),
        classes=spec.classes,
        metrics=requested_metrics(config),
    )


def figures(_: Options, spec: Spec) -> Figures:
    """Return the names of the figures. Of five classes or fewer, one of the first five is always right."""
    assert isinstance(spec, LABELLED)
    return Figures(("loss", "accuracy"), REQUESTED[spec.classes <= 5 :], BY_ROWS)


def class_weights(config: Config, classes: int) -> tuple[float, ...] | None:
    """Return CONFIG_CLASS_WEIGHTS: () for none, None for balanced ones, which the training part decides.

    Raises ConfigError unless they are positive numbers, one for each of `classes`.
    """
    text = config.class_weights
    if text in ("", "balanced"):
        return None if text else ()
    try:
        weights = tuple(map(float, text.split(",")))
    except ValueError:
        weights = (math.nan,)
    if not all(0 < weight < math.inf for weight in weights):
        what = 'is neither "balanced" nor positive numbers separated by commas'
        raise ConfigError(f"CONFIG_CLASS_WEIGHTS={text} {what}", todo=f"give {classes} numbers")
    if len(weights) != classes:
        raise ConfigError(
            f"CONFIG_CLASS_WEIGHTS={text} has {len(weights)} numbers for {classes} classes",
            todo="give one for each, in the order of the labels",
        )
    return weights


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

    top: of this many classes, from the likeliest, instead of each. Raises ConfigError for more than
    there are.
    """
    if top > spec.classes:
        todo = f"give {spec.classes} at most, or leave it out for the probability of each"
        raise ConfigError(f"TOP={top} is more than the {spec.classes} classes of the run", todo=todo)
    names_K = np.array([*class_names] or [*map(str, range(spec.classes))], object)

    def columns(probabilities_NK: npt.NDArray[np.float32]) -> Columns:
        order_NK = (-probabilities_NK).argsort(axis=1, kind="stable")
        ranked_NK = np.take_along_axis(probabilities_NK, order_NK, axis=1)
        found: Columns = {"prediction": names_K[order_NK[:, 0]], "probability": ranked_NK[:, 0]}
        for place in range(1, top):
            found[f"prediction_{place + 1}"] = names_K[order_NK[:, place]]
            found[f"probability_{place + 1}"] = ranked_NK[:, place]
        each = () if top else zip(names_K, probabilities_NK.T, strict=True)
        return found | {f"p_{name}": p_N for name, p_N in each}

    return columns


class Classify:
    """Cross-entropy with label smoothing (Szegedy et al. 2015, section 7) and class weights."""

    targets_per_sample = 1

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = (),
        classes: int = 0,
        metrics: Sequence[str] = (),
    ) -> None:
        """class_weights: of `classes`; () for 1, None for balanced ones. metrics: further ones to report."""
        self.label_smoothing, self.class_weights, self.metrics = label_smoothing, class_weights, metrics
        self._classes = classes

    def see_training(self, part: Part) -> None:
        """Balance the class weights: samples / (classes * samples of the class, at least 1)."""
        if self.class_weights is None:
            assert isinstance(part, ArrayPart)
            counts = np.bincount(part.sample_targets, minlength=self._classes).clip(min=1)
            self.class_weights = (part.size / (self._classes * counts)).tolist()

    @pure
    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the smoothed loss, and the number of correct predictions as "accuracy".

        With class weights the count is their sum, and "weighted_accuracy" the sum of those of correct ones.
        Of mixed samples each label counts by its share, for all of these.
        """
        logits_NK = full_precision(forward(batch.inputs))
        if batch.mixed is None:
            return self._scores(logits_NK, batch, training=True)
        partners, shares_N = batch.mixed
        ones = torch.ones_like(shares_N) if batch.weights is None else batch.weights
        own, other = (
            self._scores(logits_NK, replace(batch, targets=targets, weights=weights_N), training=True)
            for targets, weights_N in ((batch.targets, ones * shares_N), (partners, ones * (1 - shares_N)))
        )
        count = own.count + other.count if self.class_weights else count_of(batch)
        metrics = {name: value + other.metrics[name] for name, value in own.metrics.items()}
        return Sums(own.loss + other.loss, count, metrics)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the weighted loss and accuracy without label smoothing, and sums of further metrics."""
        logits_NK = full_precision(forward(batch.inputs))
        sums = self._scores(logits_NK, batch, training=False)
        if not self.metrics:
            return sums
        from train.tasks.metrics import with_metrics  # few runs ask for more

        return with_metrics(sums, self.metrics, logits_NK, batch)

    def _scores(self, logits_NK: Tensor, batch: Batch, *, training: bool) -> Sums:
        smoothing = self.label_smoothing if training else 0.0
        given, dtype = self.class_weights, logits_NK.dtype
        weights_K = send(torch.tensor(given, dtype=dtype), logits_NK.device) if given else None
        # Without weights the sum is one kernel.
        reduction = "sum" if batch.weights is None and weights_K is None else "none"
        loss = F.cross_entropy(
            logits_NK, batch.targets, weights_K, reduction=reduction, label_smoothing=smoothing
        )
        right_N = logits_NK.argmax(dim=1) == batch.targets
        right, count = weighted_sum(right_N, batch), count_of(batch)
        if weights_K is None:
            total = loss if reduction == "sum" else weighted_sum(loss, batch)
            return Sums(total, count, {"accuracy": right})
        weights_N = weights_K[batch.targets]
        found = {"accuracy": right, "samples": send(count, loss.device)}
        if training:
            found = {"weighted_accuracy": weighted_sum(right_N * weights_N, batch)}
        return Sums(weighted_sum(loss, batch), weighted_sum(weights_N, batch), found)

    def report(self, means: Mapping[str, Any]) -> dict[str, float]:
        """Return samples, loss and accuracy, and the requested metrics that are sums."""
        # All are means over the count, which is that of samples unless they are weighted.
        samples = means.get("samples", 1.0)
        found = {"samples": float(round(means["count"] * samples)), "loss": means["loss"]}
        found["accuracy"] = means["accuracy"] / samples
        if not self.metrics:
            return found
        from train.tasks.metrics import reported

        means = {name: value / samples for name, value in means.items()}
        return found | reported(means, self.metrics)

    def row_figures(self, *rows: Tensor) -> dict[str, float]:
        """Return the requested metrics that need all rows."""
        from train.tasks.metrics import row_figures

        return row_figures(self.metrics, *rows)

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the accuracy."""
        return evaluation["accuracy"]
