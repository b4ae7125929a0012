"""Language modelling: cross-entropy of the next token at every position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.ngram_baseline import counting_floors
from lib.data.types import Dataset, ImageSpec, Spec, TextClassSpec, TextSpec
from lib.nn import IGNORED
from lib.nn.cross_entropy import cross_entropy
from train.tasks.base import Forward, Sums, Task, full_precision, no_logits, refuse_label_smoothing
from train.tasks.classify import task as classify

DATA = ("a text, or images or texts with labels", (TextSpec, ImageSpec, TextClassSpec))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No symbols of its own."""


def build(_: Options, spec: Spec, *, config: Config) -> Task:
    """Language modelling of texts. With labels, a language model classifies."""
    if not isinstance(spec, TextSpec):
        return classify.build(classify.Options(), spec, config=config)
    refuse_label_smoothing(config, "tokens")
    return LanguageModel(spec, chunked=config.chunked_cross_entropy)


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Why what a model `returned` for `rows` samples are no logits; "" where they are."""
    if not isinstance(spec, TextSpec):
        return classify.fault(returned, spec, rows=rows)
    return no_logits(returned, (rows, *spec.input_shape), spec.vocab_size)


class LanguageModel:
    """Sums are over target tokens, so that every token weighs the same wherever its text was cut."""

    def __init__(self, spec: TextSpec, *, chunked: bool) -> None:
        """chunked: have the loss computed some rows at a time (`lib.nn.cross_entropy`)."""
        self.spec = spec
        self._losses = _chunked_losses if chunked else _losses
        self.targets_per_sample = spec.block_size

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """A batch without weights has no IGNORED target, and its count is known without the device."""
        loss_BT = self._losses(forward, batch)
        if batch.weights is None:
            return Sums(loss_BT.sum(), batch.targets.numel(), {})
        return _weighted(loss_BT, batch)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        return _weighted(self._losses(forward, batch), batch)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """loss: in nats per token. bits_per_byte: of the text itself, where its length is known."""
        tokens, loss = means["count"], means["loss"]
        result = {f"{self.spec.unit}s": tokens, "loss": loss, "perplexity": _exp(loss)}
        if self.spec.validation_bytes is not None:
            result["bits_per_byte"] = loss * tokens / math.log(2) / self.spec.validation_bytes
        return result

    def score(self, evaluation: Mapping[str, float]) -> float:
        return -evaluation["loss"]


def told_floors(dataset: Dataset, *, cache_dir: Path, say: Callable[[str], None]) -> str | None:
    """A line to read a language model's figures by: what counting achieves on the same text.

    None where no text is predicted. Counted once and kept in `cache_dir`; `say` is told of the work.
    Raises ToolkitError where the cache cannot be written.
    """
    if not isinstance(dataset.spec, TextSpec):
        return None
    return f"Floors: {counting_floors(dataset, cache_dir=cache_dir, say=say)}"


def _losses(forward: Forward, batch: Batch) -> Tensor:
    logits_BTV = full_precision(forward(batch.inputs))
    targets = batch.targets.flatten()
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="none", ignore_index=IGNORED)
    return losses.view_as(batch.targets)


def _chunked_losses(forward: Forward, batch: Batch) -> Tensor:
    logits_BTV = forward(batch.inputs)
    return cross_entropy(logits_BTV.flatten(0, 1), batch.targets.flatten()).view_as(batch.targets)


def _weighted(loss_BT: Tensor, batch: Batch) -> Sums:
    assert batch.weights is not None
    weights_BT = batch.weights[:, None] * (batch.targets != IGNORED)
    return Sums((loss_BT * weights_BT).sum(), weights_BT.sum(), {})


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
