"""Language modelling: cross-entropy of the next token at every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.ngram_baseline import ngram_baseline
from lib.data.types import LABELLED, Dataset, Spec, TextSpec
from lib.errors import ConfigError
from lib.nn import IGNORED
from lib.nn.cross_entropy import cross_entropy
from lib.nn.model_code import load_model
from lib.nn.precision import full_precision
from lib.plugins import NoOptions as Options
from train.tasks.base import Columns, Figures, Forward, Sums, Task, no_logits, refuse_label_smoothing
from train.tasks.classify import task as classify

DATA = ("a text, or images, texts or tables with labels", (TextSpec, *LABELLED))


def build(options: Options, spec: Spec, *, config: Config) -> Task:
    """Return language modelling for texts, classification for data with labels."""
    if not isinstance(spec, TextSpec):
        return classify.build(options, spec, config=config)
    refuse_label_smoothing(config, "tokens")
    chunked = config.chunked_cross_entropy
    takes_targets = chunked and vars(load_model(config.model)).get("TAKES_TARGETS", False)
    return LanguageModel(spec, chunked=chunked, takes_targets=takes_targets)


def figures(options: Options, spec: Spec) -> Figures:
    """Return the names of the figures."""
    if not isinstance(spec, TextSpec):
        return classify.figures(options, spec)
    return Figures(("loss", "perplexity", *(("bits_per_byte",) if spec.validation_bytes is not None else ())))


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return logits, else ""."""
    if not isinstance(spec, TextSpec):
        return classify.fault(returned, spec, rows=rows)
    return no_logits(returned, (rows, *spec.input_shape), spec.vocab_size)


def postprocess(outputs: Tensor, spec: Spec) -> Tensor:
    """Return the logits of a language model (B, T, V), or the probabilities of the classes (N, classes)."""
    if isinstance(spec, TextSpec):
        return full_precision(outputs)[..., : spec.vocab_size]
    assert isinstance(spec, LABELLED)
    return classify.postprocess(outputs, spec)


def predictions(spec: Spec, **options: Any) -> Callable[[Any], Columns]:
    """Return the function to the columns of a classification. Raises ConfigError for a language model."""
    if isinstance(spec, TextSpec):
        raise ConfigError("a language model predicts no class", todo="make sample PROMPT= continues a text")
    assert isinstance(spec, LABELLED)
    return classify.predictions(spec, **options)


class LanguageModel:
    """Cross-entropy of the next token, summed over target tokens, so that every token weighs the same."""

    def __init__(self, spec: TextSpec, *, chunked: bool, takes_targets: bool = False) -> None:
        """Choose where the loss is computed.

        chunked:       from the logits, in chunks of rows (`lib.nn.cross_entropy`).
        takes_targets: by the model, which takes targets and returns the sum of their losses
                       (`lib.nn.linear_cross_entropy`), so that there are never logits of all rows.
        """
        self.spec = spec
        self._takes_targets = takes_targets
        self._losses = _chunked_losses if chunked else _losses
        self.targets_per_sample = spec.block_size

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss. Without weights there are no IGNORED targets: the count is known on the host."""
        if batch.weights is not None:
            return self.evaluation(forward, batch)
        if self._takes_targets:
            return Sums(forward(batch.inputs, batch.targets), batch.targets.numel(), {})
        return Sums(self._losses(forward, batch).sum(), batch.targets.numel(), {})

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the weighted loss."""
        assert batch.weights is not None
        counted_BT = (batch.weights[:, None] > 0) & (batch.targets != IGNORED)
        if self._takes_targets:
            return Sums(forward(batch.inputs, batch.targets.where(counted_BT, IGNORED)), counted_BT.sum(), {})
        return Sums((self._losses(forward, batch) * counted_BT).sum(), counted_BT.sum(), {})

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return loss in nats per token, perplexity, and bits per byte if the text's length is known."""
        tokens, loss = means["count"], means["loss"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        result = {f"{self.spec.unit}s": tokens, "loss": loss, "perplexity": perplexity}
        if self.spec.validation_bytes is not None:
            result["bits_per_byte"] = loss * tokens / math.log(2) / self.spec.validation_bytes
        return result

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the negative loss."""
        return -evaluation["loss"]


def naive_loss(spec: Spec) -> float:
    """Return the cross-entropy of a uniform guess: of the next token, or with labels of the class."""
    return math.log(spec.vocab_size) if isinstance(spec, TextSpec) else classify.naive_loss(spec)


def baseline(dataset: Dataset, *, cache_dir: Path, log: Callable[[str], None]) -> str | None:
    """Return the n-gram baseline as a line of text, cached in `cache_dir`; None for data with labels.

    Raises ToolkitError if the cache cannot be written.
    """
    if not isinstance(dataset.spec, TextSpec):
        return None
    return f"N-gram baseline: {ngram_baseline(dataset, cache_dir=cache_dir, log=log)}"


def _losses(forward: Forward, batch: Batch) -> Tensor:
    logits_BTV = full_precision(forward(batch.inputs))
    targets = batch.targets.flatten()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="none", ignore_index=IGNORED)
    return losses.view_as(batch.targets)


def _chunked_losses(forward: Forward, batch: Batch) -> Tensor:
    logits_BTV = forward(batch.inputs)
    return cross_entropy(logits_BTV.flatten(0, 1), batch.targets.flatten()).view_as(batch.targets)
