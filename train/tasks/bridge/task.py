"""Training of a prefix that two frozen language models read in place of a text.

The input of each model is prefix, anchor and answer; the loss is on the answer. If all tokens of an answer
are predicted correctly, greedy decoding writes that answer, so exact match needs no decoding. Each model may
be on its own device; losses return to the device of the trained model, and autograd moves the gradients.

Shapes: B samples, M latents, L tokens of an answer, T tokens of a text, C channels, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.data.loader import Batch
from lib.data.types import Dataset, Spec
from lib.nn import IGNORED
from lib.nn.precision import full_precision
from train.tasks.base import Forward, Sums, count_of, refuse_label_smoothing, weighted_sum
from train.tasks.bridge.frozen import FrozenLM, FrozenPair
from train.tasks.bridge.pretrain import frozen_sources

DATA = ("questions", (AnswerSpec,))
SELECTS = "MODEL_DATA_ANSWERS"

NAMES = ("a", "b")  # of the two models in figures
KINDS = ("latent", "zero_prefix", "shuffled_prefix", "text_budget", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of train/tasks/bridge/Kconfig."""

    first_token_weight: float
    frozen_steps: int


def build(
    options: Options, spec: Spec, *, config: Config, prepared: tuple[FrozenLM, FrozenLM] | None
) -> Bridge:
    """Return the task. Raises ConfigError for label smoothing."""
    assert isinstance(spec, AnswerSpec) and prepared is not None
    refuse_label_smoothing(config, "tokens")
    return Bridge(spec, prepared, first_token_weight=options.first_token_weight)


def prepare(
    config: Config, dataset: Dataset, *, root: Path, learned: bool, log: Callable[[str], None]
) -> FrozenPair:
    """Return the two language models, pretrained if they are of the toolkit (learned: false for random)."""
    return FrozenPair(frozen_sources(config, dataset, root=root, learned=learned, log=log))


def fault(returned: Any, spec: Spec, *, rows: int) -> str:  # noqa: ARG001
    """Return the fault if a model did not return two prefixes, else ""."""
    pair = isinstance(returned, tuple) and [isinstance(one, Tensor) and one.dim() for one in returned]
    return "" if pair == [3, 3] else "not a prefix (N, M, C) for each of two language models"


class _AnswerScores(NamedTuple):
    loss_B: Tensor
    exact_B: Tensor


class _Branch(NamedTuple):
    """One of the two models with the tokens of its anchor."""

    lm: FrozenLM
    anchor: Tensor
    device: torch.device


class Bridge:
    """Task of a model such as models/latentwire: bytes to a prefix for each frozen model."""

    targets_per_sample = 1

    def __init__(
        self, spec: AnswerSpec, frozen: tuple[FrozenLM, FrozenLM], *, first_token_weight: float
    ) -> None:
        """first_token_weight: of the first token's loss, added to the mean over the answer."""
        self.frozen = frozen
        self._spec, self._first_weight = spec, first_token_weight
        devices = [lm.embedding_rms.device for lm in frozen]
        anchors = [
            torch.tensor(side.anchor).to(device) for side, device in zip(spec.sides, devices, strict=True)
        ]
        self._parts = tuple(map(_Branch, frozen, anchors, devices))

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return sums of the mean loss of both models. Metrics: exactly right answers."""
        answers, _, _ = self._columns(batch.targets)
        scores = self._score_all(forward(batch.inputs), answers)
        metrics = {
            f"exact_{name}": weighted_sum(each.exact_B, batch)
            for name, each in zip(NAMES, scores, strict=True)
        }
        return Sums(weighted_sum(_mean_loss(scores), batch), count_of(batch), metrics)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return exact match with the latents, and with all that they are compared to (`report`)."""
        assert batch.weights is not None
        weights_B = batch.weights
        home = batch.inputs.device
        answers, texts, others = self._columns(batch.targets)
        prefixes, shuffled = forward(batch.inputs), forward(others)
        zeros = [torch.zeros_like(prefix_BMC) for prefix_BMC in prefixes]
        scores = self._score_all(prefixes, answers)
        found: dict[str, Sequence[Tensor]] = {"latent": [each.exact_B for each in scores]}
        for kind, given in (("zero_prefix", zeros), ("shuffled_prefix", shuffled)):
            found[kind] = [each.exact_B for each in self._score_all(given, answers)]
        budgeted, whole = list[Tensor](), list[Tensor]()
        for part, text_BT, answer_BL in zip(self._parts, texts, answers, strict=True):
            tokens = prefixes[0].shape[1] + part.anchor.numel()
            last_BW = _last_tokens(text_BT, answer_BL, tokens=tokens)
            budgeted.append(_reads(part.lm, last_BW, answer_BL).to(home))
            whole.append(_reads(part.lm, text_BT, answer_BL).to(home))
        found |= {"text_budget": budgeted, "text": whole}
        metrics = {
            f"{kind}_{name}": (exact_B * weights_B).sum()
            for kind in KINDS
            for name, exact_B in zip(NAMES, found[kind], strict=True)
        }
        return Sums((_mean_loss(scores) * weights_B).sum(), weights_B.sum(), metrics)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the exact-match rates by the model's input before the anchor.

        latent: the prefix; zero_prefix: zeros; shuffled_prefix: another sample's prefix; text_budget: the
        last tokens of the source, as many as latents; text: the whole source.
        """
        figures = {f"{kind}_{name}": means[f"{kind}_{name}"] for kind in KINDS for name in NAMES}
        return {"samples": means["count"], "loss": means["loss"]} | figures

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the lower exact-match rate of the two models."""
        return min(evaluation[f"latent_{name}"] for name in NAMES)

    def weights(self) -> list[Tensor]:
        """Return the weights of the frozen models."""
        return [weight for lm in self.frozen for weight in lm.weights()]

    def _columns(self, targets_BN: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Split targets into answers and whole texts, on the models' devices, and other samples' sources."""
        answer_a, text_a, answer_b, text_b, others = torch.split(targets_BN, list(self._spec.columns), dim=1)
        a, b = (part.device for part in self._parts)
        return (answer_a.to(a), answer_b.to(b)), (text_a.to(a), text_b.to(b)), others

    def _score_all(self, prefixes: Sequence[Tensor], answers: Sequence[Tensor]) -> list[_AnswerScores]:
        """Score the answers after each prefix, on the device of the prefixes."""
        home = prefixes[0].device
        # All prefixes are copied first and scores last, so that the two models run concurrently.
        given = [prefix.to(part.device) for part, prefix in zip(self._parts, prefixes, strict=True)]
        scores = [
            _score(part, prefix_BMC, answer_BL, first_weight=self._first_weight)
            for part, prefix_BMC, answer_BL in zip(self._parts, given, answers, strict=True)
        ]
        return [_AnswerScores(each.loss_B.to(home), each.exact_B.to(home)) for each in scores]


def _score(part: _Branch, prefix_BMC: Tensor, answer_BL: Tensor, *, first_weight: float) -> _AnswerScores:
    """Score the answer after prefix and anchor with teacher forcing."""
    lm, length = part.lm, answer_BL.shape[1]
    anchor_BL = part.anchor.expand(len(answer_BL), -1)
    known_BT = torch.cat((anchor_BL, answer_BL[:, :-1].clamp(min=0)), dim=1)
    # Scaled to the magnitude of the model's embeddings.
    known_BTC = lm.embed(known_BT)
    prefix_BMC = (prefix_BMC * lm.embedding_rms).to(known_BTC.dtype)
    logits_BTV = lm.logits(torch.cat((prefix_BMC, known_BTC), dim=1))
    logits_BLV = full_precision(logits_BTV[:, -length:])
    losses = F.cross_entropy(
        logits_BLV.flatten(0, 1), answer_BL.flatten(), reduction="none", ignore_index=IGNORED
    )
    loss_BL, is_token_BL = losses.view_as(answer_BL), answer_BL != IGNORED
    loss_B = loss_BL.sum(dim=1) / is_token_BL.sum(dim=1) + first_weight * loss_BL[:, 0]
    right_BL = (logits_BLV.argmax(dim=2) == answer_BL) | ~is_token_BL
    return _AnswerScores(loss_B, right_BL.all(dim=1))


def _mean_loss(scores: Sequence[_AnswerScores]) -> Tensor:
    return torch.stack([each.loss_B for each in scores]).mean(dim=0)


def _reads(lm: FrozenLM, text_BT: Tensor, answer_BL: Tensor) -> Tensor:
    """Return whether `lm` predicts the answer at the end of each text: (B,)."""
    logits_BTV = lm.logits(lm.embed(text_BT[:, :-1].clamp(min=0)))
    following_BT = text_BT[:, 1:]
    place_T = torch.arange(1, text_BT.shape[1], device=text_BT.device)
    start_B1 = _count(text_BT) - _count(answer_BL)
    is_answer_BT = (place_T >= start_B1) & (following_BT != IGNORED)
    return ((logits_BTV.argmax(dim=2) == following_BT) | ~is_answer_BT).all(dim=1)


def _last_tokens(text_BT: Tensor, answer_BL: Tensor, *, tokens: int) -> Tensor:
    """Return the last `tokens` tokens before the answer, and the answer."""
    end_B1 = _count(text_BT)
    start_B1 = (end_B1 - _count(answer_BL) - tokens).clamp(min=0)
    width = min(tokens + answer_BL.shape[1], text_BT.shape[1])
    place_BW = start_B1 + torch.arange(width, device=text_BT.device)
    tokens_BW = text_BT.gather(1, place_BW.clamp(max=text_BT.shape[1] - 1))
    return torch.where(place_BW < end_B1, tokens_BW, IGNORED)


def _count(tokens_BT: Tensor) -> Tensor:
    """Count tokens that are not IGNORED: (B, 1)."""
    return (tokens_BT != IGNORED).sum(dim=1, keepdim=True)
