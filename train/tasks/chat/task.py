"""Answers of conversations: cross-entropy of their tokens, and whether greedy decoding writes them.

Greedy decoding writes an answer exactly if and only if the model's likeliest token at each of its places,
given the true ones before, is the true one. So exact match is counted without decoding: of all answers of a
conversation with their ends, each after the true conversation before it.

Shapes: B rows, T tokens, V vocabulary size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lib.config import Config
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.loader import Batch
from lib.data.types import Spec
from lib.memory.simulation import simulated
from lib.nn import IGNORED
from lib.plugins import NoOptions as Options
from train.tasks.base import Figures, Forward, Sums, no_logits, pure
from train.tasks.lm.task import LanguageModel, counted_targets, place_of_loss, postprocess, predictions

__all__ = ["postprocess", "predictions"]  # those of a language model
DATA = ("conversations", (ChatSpec,))
_LOGITS = 1 << 26  # of a forward pass in evaluation, or those of one row


def build(_: Options, spec: Spec, *, config: Config) -> Chat:
    """Return the task. Raises ConfigError for label smoothing and class weights."""
    assert isinstance(spec, ChatSpec)
    return Chat(spec, **place_of_loss(config))


def figures(_: Options, __: Spec) -> Figures:
    """Return the names of the figures."""
    return Figures(("loss", "perplexity", "exact_match"))


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return logits, else ""."""
    assert isinstance(spec, ChatSpec)
    return no_logits(returned, (rows, spec.block_size), spec.vocab_size, padded=True)


def naive_loss(spec: Spec) -> float:
    """Return the cross-entropy of a uniform guess of the next token."""
    assert isinstance(spec, ChatSpec)
    return math.log(spec.vocab_size)


class Chat(LanguageModel):
    """Cross-entropy of the tokens of answers, summed, so that each of them weighs the same."""

    @pure
    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss; the count is on the device."""
        return super().evaluation(forward, batch)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the weighted loss, and the numbers of conversations and of those that are exact."""
        targets_BT = counted_targets(batch)
        rows = len(targets_BT)
        if self._takes_targets:  # then there is no room for the logits of all rows
            rows = max(1, _LOGITS // (self.spec.block_size * self.spec.vocab_size))
        parts = [*zip(torch.split(batch.inputs, rows), torch.split(targets_BT, rows), strict=True)]
        parts = parts[:2] if simulated() else parts  # others use the memory of these again
        sums = [self._scores(forward(inputs), inputs, own_BT) for inputs, own_BT in parts]
        loss, exact, conversations = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        counts = {"exact_match": exact, "conversations": conversations}
        return Sums(loss, (targets_BT != IGNORED).sum(), counts)

    def _scores(self, logits_BTV: Tensor, inputs: Tensor, targets_BT: Tensor) -> tuple[Tensor, ...]:
        """Return the summed loss, the number of exact conversations, and that of all."""
        loss = self._losses(logits_BTV.flatten(0, 1), targets_BT.flatten()).sum()
        counts_BT = targets_BT != IGNORED
        # The place of padding is 0, and that of conversations in a row from 1.
        places_BT = inputs[:, 1] + 1 if inputs.dim() == 3 else torch.ones_like(targets_BT)
        # Some models have rows for more tokens than there are: they are not drawn.
        likeliest_BT = logits_BTV[..., : self.spec.vocab_size].argmax(dim=2)
        wrong_BT = counts_BT & (likeliest_BT != targets_BT)
        counted_BD, wrong_BD = (
            counts_BT.new_zeros(len(counts_BT), counts_BT.shape[1] + 1, dtype=torch.int64).scatter_add(
                1, places_BT, each_BT.long()
            )
            for each_BT in (counts_BT, wrong_BT)
        )
        return loss, ((counted_BD > 0) & (wrong_BD == 0)).sum(), (counted_BD > 0).sum()

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return loss in nats per token of an answer, perplexity, and the share of exact conversations."""
        exact = {
            "exact_match": means["exact_match"] / means["conversations"],
            "conversations": round(means["conversations"] * means["count"]),
        }
        return super().report(means) | exact
