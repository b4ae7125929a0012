"""Language modelling: cross-entropy of the next token at every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.loader import Batch
from lib.data.ngram_baseline import ngram_baseline
from lib.data.types import LABELLED, Dataset, Spec, TextSpec
from lib.errors import ConfigError
from lib.nn import IGNORED
from lib.nn.cross_entropy import cross_entropy
from lib.nn.model_code import load_model
from lib.nn.precision import full_precision
from lib.plugins import NoOptions as Options
from train.tasks.base import Columns, Figures, Forward, Sums, Task, no_logits, pure, refuse_label_smoothing
from train.tasks.classify import task as classify

CONTINUED = (TextSpec, ChatSpec)  # texts, whose answers are logits of the next token
DATA = ("a text, or images, texts or tables with labels", (TextSpec, *LABELLED))


def build(options: Options, spec: Spec, *, config: Config) -> Task:
    """Return language modelling for texts, classification for data with labels."""
    if not isinstance(spec, TextSpec):
        return classify.build(options, spec, config=config)
    return LanguageModel(spec, **place_of_loss(config))


def place_of_loss(config: Config) -> dict[str, bool]:
    """Return where a LanguageModel computes its loss. Raises ConfigError for label smoothing."""
    refuse_label_smoothing(config, "tokens")
    chunked = config.chunked_cross_entropy
    takes_targets = chunked and vars(load_model(config.model)).get("TAKES_TARGETS", False)
    return {"chunked": chunked, "takes_targets": takes_targets}


def figures(options: Options, spec: Spec) -> Figures:
    """Return the names of the figures."""
    if not isinstance(spec, TextSpec):
        return classify.figures(options, spec)
    return Figures(("loss", "perplexity", *(("bits_per_byte",) if spec.validation_bytes is not None else ())))


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return logits, else ""."""
    if not isinstance(spec, TextSpec):
        return classify.fault(returned, spec, rows=rows)
    return no_logits(returned, (rows, *spec.input_shape), spec.vocab_size, padded=True)


def postprocess(outputs: Tensor, spec: Spec) -> Tensor:
    """Return the logits of a language model (B, T, V), or the probabilities of the classes (N, classes)."""
    if isinstance(spec, CONTINUED):
        return full_precision(outputs)[..., : spec.vocab_size]
    assert isinstance(spec, LABELLED)
    return classify.postprocess(outputs, spec)


def predictions(spec: Spec, **options: Any) -> Callable[[Any], Columns]:
    """Return the function to the columns of a classification. Raises ConfigError for a language model."""
    if isinstance(spec, CONTINUED):
        raise ConfigError("a language model predicts no class", todo="make sample PROMPT= continues a text")
    assert isinstance(spec, LABELLED)
    return classify.predictions(spec, **options)


class LanguageModel:
    """Cross-entropy of the next token, summed over target tokens, so that every token weighs the same."""

    def __init__(self, spec: TextSpec | ChatSpec, *, chunked: bool, takes_targets: bool = False) -> None:
        """Choose where the loss is computed.

        chunked:       from the logits, in chunks of rows (`lib.nn.cross_entropy`).
        takes_targets: by the model, which takes targets and returns the sum of their losses
                       (`lib.nn.linear_cross_entropy`), so that there are never logits of all rows.
        """
        self.spec = spec
        self._takes_targets = takes_targets
        self._losses = cross_entropy if chunked else _cross_entropy
        self.targets_per_sample = spec.block_size

    @pure
    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss. Without weights there are no IGNORED targets: the count is known on the host."""
        if batch.weights is not None:
            return self.evaluation(forward, batch)
        return Sums(self._loss(forward, batch.inputs, batch.targets), batch.targets.numel(), {})

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the weighted loss."""
        targets_BT = counted_targets(batch)
        return Sums(self._loss(forward, batch.inputs, targets_BT), (targets_BT != IGNORED).sum(), {})

    def _loss(self, forward: Forward, inputs: Tensor, targets_BT: Tensor) -> Tensor:
        if self._takes_targets:
            loss: Tensor = forward(inputs, targets_BT)
            return loss
        return self._losses(forward(inputs).flatten(0, 1), targets_BT.flatten()).sum()

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return loss in nats per token, perplexity, and bits per byte if the text's length is known."""
        tokens, loss = means["count"], means["loss"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        result = {f"{self.spec.unit}s": tokens, "loss": loss, "perplexity": perplexity}
        if isinstance(self.spec, TextSpec) and self.spec.validation_bytes is not None:
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


def counted_targets(batch: Batch) -> Tensor:
    """Return the targets (B, T), IGNORED in rows of padding."""
    targets_BT = batch.targets
    return targets_BT if batch.weights is None else targets_BT.where(batch.weights[:, None] > 0, IGNORED)


def _cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(full_precision(logits_NV), targets_N, reduction="none", ignore_index=IGNORED)
