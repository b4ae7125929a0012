"""Token classification: a tag for each word of a text, at its last token.

Shapes: B texts, T tokens, K tags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import Spec, TokenTagSpec
from lib.devices.base import send
from lib.nn import IGNORED
from lib.nn.precision import full_precision
from lib.plugins import NoOptions as Options
from train.tasks.base import Figures, Forward, Sums, no_logits, pure, refuse_label_smoothing

DATA = ("texts with a tag for each word", (TokenTagSpec,))
_ENTITIES = ("entities_right", "entities_predicted", "entities_actual")


def build(_: Options, spec: Spec, *, config: Config) -> Tag:
    """Return the task. Raises ConfigError for label smoothing and class weights."""
    assert isinstance(spec, TokenTagSpec)
    refuse_label_smoothing(config, "tags")
    return Tag(spec)


def figures(_: Options, spec: Spec) -> Figures:
    """Return the names of the figures."""
    assert isinstance(spec, TokenTagSpec)
    return Figures(("loss", "accuracy", *(("entity_f1",) if is_bio(spec.tags) else ())))


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return logits of the tags at every position, else ""."""
    assert isinstance(spec, TokenTagSpec)
    return no_logits(returned, (rows, *spec.input_shape), len(spec.tags))


def naive_loss(spec: Spec) -> float:
    """Return the cross-entropy of a uniform guess of the tag."""
    assert isinstance(spec, TokenTagSpec)
    return math.log(len(spec.tags))


def is_bio(tags: Sequence[str]) -> bool:
    """Return True for tags of entities: B-KIND for the first word of one, I-KIND for others, O elsewhere."""
    return all(tag == "O" or tag.startswith(("B-", "I-")) for tag in tags) and {*tags} != {"O"}


class Tag:
    """Cross-entropy of the tag of each word, summed over words, so that every word weighs the same."""

    def __init__(self, spec: TokenTagSpec) -> None:
        self.targets_per_sample = spec.block_size
        self._is_bio = is_bio(spec.tags)
        kinds = sorted({tag[2:] for tag in spec.tags if tag != "O"})
        self._kinds = [0 if tag == "O" else 1 + kinds.index(tag[2:]) for tag in spec.tags]  # of each tag
        self._begins = [tag.startswith("B-") for tag in spec.tags]

    @pure
    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss, and the number of right tags as "accuracy"."""
        return self._sums(full_precision(forward(batch.inputs)), batch)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the weighted loss and accuracy, and the numbers of entities where tags tell them."""
        logits_BTK = full_precision(forward(batch.inputs))
        sums = self._sums(logits_BTK, batch)
        if not self._is_bio:
            return sums
        predicted_BT = logits_BTK.argmax(dim=2)
        (starts_BT, *own), (found_BT, *theirs) = (
            self._spans(tags_BT, batch.targets != IGNORED) for tags_BT in (batch.targets, predicted_BT)
        )
        right_BT = starts_BT & found_BT
        for one, other in zip(own, theirs, strict=True):
            right_BT = right_BT & (one == other)
        weights_B1 = 1 if batch.weights is None else batch.weights[:, None]
        counted = zip(_ENTITIES, (right_BT, found_BT, starts_BT), strict=True)
        entities = {name: (where_BT * weights_B1).sum() for name, where_BT in counted}
        return Sums(sums.loss, sums.count, {**sums.metrics, **entities})

    @staticmethod
    def _sums(logits_BTK: Tensor, batch: Batch) -> Sums:
        targets = batch.targets.flatten()
        losses = F.cross_entropy(logits_BTK.flatten(0, 1), targets, reduction="none", ignore_index=IGNORED)
        weights_BT = (batch.targets != IGNORED).to(losses.dtype)
        if batch.weights is not None:
            weights_BT = weights_BT * batch.weights[:, None]
        right_BT = logits_BTK.argmax(dim=2) == batch.targets
        found = {"accuracy": (right_BT * weights_BT).sum()}
        return Sums((losses.view_as(weights_BT) * weights_BT).sum(), weights_BT.sum(), found)

    def _spans(self, tags_BT: Tensor, is_word_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return where an entity starts, the kind at each word (0 for none), and where that entity ends.

        Words come first in each row. As in CoNLL's evaluation, I-KIND starts an entity unless the word
        before it is of that kind.
        """
        order_BT = (~is_word_BT).to(torch.uint8).argsort(dim=1, stable=True)
        kinds_K, begins_K = (send(torch.tensor(each), tags_BT.device) for each in (self._kinds, self._begins))
        tags_BT = tags_BT.clamp(min=0)
        kind_BT = (kinds_K[tags_BT] * is_word_BT).gather(1, order_BT)
        begins_BT = (begins_K[tags_BT] & is_word_BT).gather(1, order_BT)
        start_BT = (kind_BT > 0) & (begins_BT | (kind_BT != F.pad(kind_BT[:, :-1], (1, 0))))
        goes_on_BT = F.pad((kind_BT[:, 1:] == kind_BT[:, :-1]) & ~start_BT[:, 1:], (0, 1))
        places_T = torch.arange(kind_BT.shape[1], device=kind_BT.device)
        end_BT = places_T.masked_fill(goes_on_BT, kind_BT.shape[1]).flip(1).cummin(dim=1).values.flip(1)
        return start_BT, kind_BT, end_BT

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return words, loss and accuracy, and the F1 of entities, nan without any.

        An entity is right if its words and its kind are.
        """
        found = {"words": means["count"], "loss": means["loss"], "accuracy": means["accuracy"]}
        if self._is_bio:
            right, predicted, actual = (means[name] for name in _ENTITIES)
            found["entity_f1"] = 2 * right / (predicted + actual) if predicted + actual else math.nan
        return found

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the F1 of entities, or the accuracy where the tags tell none."""
        return evaluation.get("entity_f1", evaluation["accuracy"])
