"""Metrics of labels beyond accuracy: from sums over micro-batches, or from all rows of an evaluation.

Shapes: N rows, K classes or labels, B bins. Targets are classes (N,), or zeros and ones (N, K).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import ArrayPart, Dataset, Part
from lib.errors import ConfigError, meant
from train.tasks.base import Sums, figures_of, requested_metrics

BINS = 15  # of confidence
TOP = 5
_COUNTS, _TOP, _GAPS = "label_counts", "top5_accuracy", "confidence_gaps"


def check_figures(config: Config, dataset: Dataset) -> None:
    """Raise ConfigError for a metric that the task does not report, or that cannot be had of `dataset`."""
    known = figures_of(config, dataset.spec)
    metrics, best = requested_metrics(config), config.evaluation.best_metric
    reported = (*known.always, *metrics)
    for symbol, name, names in (
        *(("METRICS", name, known.requested) for name in metrics),
        *(("BEST_METRIC", name, reported) for name in (best,) if name),
    ):
        if name not in names:
            add = f"name it in CONFIG_METRICS, too: {','.join((*metrics, name))}"
            none = "leave it empty: there are none"
            todo = add if name in known.requested else meant(name, names) if names else none
            raise ConfigError(f"CONFIG_{symbol}: {config.task} does not report {name!r}", todo=todo)
    if by_rows := [name for name in metrics if name in known.by_rows]:
        _check_rows(by_rows, dataset.test, most=config.evaluation.eval_rows_max)


def _check_rows(names: Collection[str], part: Part, *, most: int) -> None:
    """Raise ConfigError where metrics `names` by rows cannot be had of an evaluation `part`.

    most: CONFIG_EVAL_ROWS_MAX.
    """
    if part.size > most:
        raise ConfigError(
            f"CONFIG_METRICS: {next(iter(names))} keeps the outputs of all {part.size:,} evaluation samples",
            why=f"CONFIG_EVAL_ROWS_MAX={most}",
            todo="raise that if they fit into main memory, or ask for other metrics",
        )
    if "roc_auc" in names and isinstance(part, ArrayPart) and part.targets.strides[0]:
        targets = part.sample_targets  # not those of metadata, which are one zero
        if (targets == targets[:1]).all():
            raise ConfigError(
                "CONFIG_METRICS: roc_auc needs more than one class",
                why=f"all {len(targets):,} evaluation samples have the same targets",
                todo="evaluate on other samples, or ask for other metrics",
            )


def with_metrics(sums: Sums, names: Collection[str], logits_NK: Tensor, batch: Batch) -> Sums:
    """Add to the `sums` of an evaluation batch what `reported` and `row_figures` need for metrics `names`."""
    weights_N = logits_NK.new_ones(len(logits_NK)) if batch.weights is None else batch.weights
    found, one_label = dict(sums.metrics), batch.targets.dim() == 1
    if {"macro_f1", "micro_f1"} & {*names}:
        predicted_NK = _one_hot(logits_NK.argmax(dim=1), logits_NK) if one_label else logits_NK > 0
        found[_COUNTS] = label_counts(predicted_NK, _actual(batch.targets, logits_NK), weights_N)
    if _TOP in names:
        likeliest_NT = logits_NK.topk(min(TOP, logits_NK.shape[1]), dim=1).indices
        found[_TOP] = ((likeliest_NT == batch.targets[:, None]).any(dim=1) * weights_N).sum()
    if "calibration_error" in names:
        confidence_N, class_N = logits_NK.softmax(dim=1).max(dim=1)
        gaps_N = (confidence_N - (class_N == batch.targets).to(confidence_N)) * weights_N
        bins_N = (confidence_N * BINS).long().clamp(max=BINS - 1)
        found[_GAPS] = gaps_N @ _one_hot(bins_N, logits_NK.new_empty(0, BINS)).to(gaps_N)
    if not _FORMULAS.keys() & {*names}:
        return replace(sums, metrics=found)
    # Logarithms keep apart what is rounded to 1 as a probability.
    scores_NK = logits_NK.log_softmax(dim=1) if one_label else logits_NK
    return replace(sums, metrics=found, rows=(scores_NK, batch.targets, weights_N))


def label_counts(predicted_NK: Tensor, actual_NK: Tensor, weights_N: Tensor) -> Tensor:
    """Return for each label the rows that are right, predicted and actual: (3, K)."""
    columns = (predicted_NK & actual_NK, predicted_NK, actual_NK)
    return torch.stack([weights_N @ column.to(weights_N) for column in columns])


def reported(means: Mapping[str, Any], names: Collection[str]) -> dict[str, float]:
    """Return those of `names` that follow from the means over samples of what `with_metrics` added."""
    found = {}
    if {"macro_f1", "micro_f1"} & {*names}:
        found = {"micro_f1": float(f1(means[_COUNTS].sum(dim=1))), "macro_f1": macro_f1(means[_COUNTS])}
    if _TOP in names:
        found[_TOP] = means[_TOP]
    if "calibration_error" in names:  # Guo et al. 2017, section 2
        found["calibration_error"] = float(means[_GAPS].abs().sum())
    return {name: found[name] for name in names if name in found}


def f1(counts: Tensor) -> Tensor:
    """Return 2 TP / (predicted + actual) from `label_counts` (3, ...): nan where a label never occurs."""
    return 2 * counts[0] / (counts[1] + counts[2])


def macro_f1(counts_3K: Tensor) -> float:
    """Return the mean F1 over the labels that are predicted or actual somewhere."""
    return float(f1(counts_3K).nanmean())


def row_figures(names: Collection[str], scores_NK: Tensor, targets: Tensor) -> dict[str, float]:
    """Return those of `names` that need all rows: means over the labels for which they are defined.

    Of two classes they are those of the second one; nan where a score is nan.
    """
    wanted, actual_NK = [name for name in names if name in _FORMULAS], _actual(targets, scores_NK)
    if scores_NK.isnan().any():
        return dict.fromkeys(wanted, math.nan)
    is_binary = targets.dim() == 1 and scores_NK.shape[1] == 2
    pairs = [*zip(scores_NK.T, actual_NK.T, strict=True)][is_binary:]
    return {name: float(torch.stack([_FORMULAS[name](*pair) for pair in pairs]).nanmean()) for name in wanted}


def roc_auc(scores_N: Tensor, actual_N: Tensor) -> Tensor:
    """Return the chance that a positive row has a higher score than a negative one; a tie is a half.

    nan without both.
    """
    places_N, counts_U = _places(scores_N)
    ranks_U = counts_U.cumsum(dim=0) - (counts_U - 1) / 2  # the mean of those that tie, from 1
    positives = actual_N.sum().double()
    pairs = positives * (len(actual_N) - positives)
    return (ranks_U[places_N][actual_N].double().sum() - positives * (positives + 1) / 2) / pairs


def average_precision(scores_N: Tensor, actual_N: Tensor) -> Tensor:
    """Return the sum over thresholds of the gain in recall times the precision; nan without positive rows.

    Rows with equal scores are on one side of a threshold together.
    """
    places_N, counts_U = _places(scores_N)
    hits_U = places_N.bincount(weights=actual_N.double(), minlength=len(counts_U)).flip(0)
    precision_U = hits_U.cumsum(dim=0) / counts_U.flip(0).cumsum(dim=0)
    return (hits_U * precision_U).sum() / hits_U.sum()


def _places(scores_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each score among the U different ones, lowest first, and how often each occurs."""
    _, places_N, counts_U = torch.unique(scores_N, return_inverse=True, return_counts=True)
    return places_N, counts_U


def _one_hot(places_N: Tensor, like_NK: Tensor) -> Tensor:
    return places_N[:, None] == torch.arange(like_NK.shape[1], device=places_N.device)


def _actual(targets: Tensor, like_NK: Tensor) -> Tensor:
    return _one_hot(targets, like_NK) if targets.dim() == 1 else targets > 0.5


_FORMULAS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "roc_auc": roc_auc,
    "average_precision": average_precision,
}
