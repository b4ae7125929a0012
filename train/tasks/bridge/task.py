"""Two frozen language models learn nothing; what they read in the place of a text does.

For each model the input is the latent prefix, the anchor and the answer; the loss is on the answer. As the
prediction of every token of an answer is right only if greedy decoding would have written the very answer,
up to the end of its line, exact match needs no decoding.

Each of the two may be on a device of its own: prefix and tokens come to it, a loss for each sample goes back
to where the trained model is, and autograd takes gradients the same way.

Shapes: B samples, M latents, L tokens of an answer, T tokens of a text, C channels, V tokens of a vocabulary.
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
from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.loader import Batch
from lib.data.types import Dataset, Spec
from lib.nn import IGNORED
from train.tasks.base import Forward, Sums, full_precision, refuse_label_smoothing
from train.tasks.bridge.frozen import FrozenLM, FrozenPair
from train.tasks.bridge.pretrain import frozen_sources

DATA = ("questions", (AnswerSpec,))
SELECTS = "MODEL_DATA_ANSWERS"

NAMES = ("a", "b")  # of the two models, in figures
KINDS = ("latent", "zero_prefix", "shuffled_prefix", "text_budget", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of train/tasks/bridge/Kconfig."""

    first_token_weight: float
    frozen_steps: int


def build(
    options: Options, spec: Spec, *, config: Config, prepared: tuple[FrozenLM, FrozenLM] | None
) -> Bridge:
    """What two frozen language models say of a prefix."""
    assert isinstance(spec, AnswerSpec) and prepared is not None
    refuse_label_smoothing(config, "tokens")
    return Bridge(spec, prepared, first_token_weight=options.first_token_weight)


def prepare(
    config: Config, dataset: Dataset, *, root: Path, learned: bool, say: Callable[[str], None]
) -> FrozenPair:
    """The two language models, those of the toolkit trained first; learned: false for random weights."""
    return FrozenPair(frozen_sources(config, dataset, root=root, learned=learned, say=say))


def fault(returned: Any, spec: Spec, *, rows: int) -> str:  # noqa: ARG001
    """Why what a model `returned` are no two prefixes; "" where they are."""
    pair = isinstance(returned, tuple) and [isinstance(one, Tensor) and one.dim() for one in returned]
    return "" if pair == [3, 3] else "not a prefix (N, M, C) for each of two language models"


class _Judged(NamedTuple):
    loss_B: Tensor
    exact_B: Tensor


class _Part(NamedTuple):
    """One of the two models, and the tokens of its anchor."""

    lm: FrozenLM
    anchor: Tensor

    @classmethod
    def of(cls, lm: FrozenLM, side: Side) -> _Part:
        return cls(lm, torch.tensor(side.anchor).to(lm.embedding_rms.device))

    @property
    def device(self) -> torch.device:
        return self.lm.embedding_rms.device


class Bridge:
    """The trained model is one as models/latentwire: bytes to a prefix for each of the frozen ones."""

    targets_per_sample = 1

    def __init__(
        self, spec: AnswerSpec, frozen: tuple[FrozenLM, FrozenLM], *, first_token_weight: float
    ) -> None:
        """first_token_weight: of its loss, beside the mean over the tokens of an answer."""
        self.frozen = frozen
        self._spec, self._first_weight = spec, first_token_weight
        self._parts = tuple(_Part.of(lm, side) for lm, side in zip(frozen, spec.sides, strict=True))

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Sums over samples, each the mean of both models. Metrics: answers that are right to the token."""
        answers, _, _ = self._columns(batch.targets)
        judged = self._answered(forward(batch.inputs), answers)
        metrics = {f"exact_{name}": each.exact_B.sum() for name, each in zip(NAMES, judged, strict=True)}
        return Sums(_mean_loss(judged).sum(), len(batch.targets), metrics)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Exact match from the latents, and from all that they are to be compared with (`report`)."""
        assert batch.weights is not None
        weights_B = batch.weights
        home = batch.inputs.device
        answers, texts, others = self._columns(batch.targets)
        prefixes, shuffled = forward(batch.inputs), forward(others)
        zeros = [torch.zeros_like(prefix_BMC) for prefix_BMC in prefixes]
        judged = self._answered(prefixes, answers)
        found: dict[str, Sequence[Tensor]] = {"latent": [each.exact_B for each in judged]}
        for kind, given in (("zero_prefix", zeros), ("shuffled_prefix", shuffled)):
            found[kind] = [each.exact_B for each in self._answered(given, answers)]
        latents = prefixes[0].shape[1]
        found["text_budget"] = [
            _reads(
                part.lm, _last_tokens(text_BT, answer_BL, tokens=latents + part.anchor.numel()), answer_BL
            ).to(home)
            for part, text_BT, answer_BL in zip(self._parts, texts, answers, strict=True)
        ]
        found["text"] = [
            _reads(part.lm, text_BT, answer_BL).to(home)
            for part, text_BT, answer_BL in zip(self._parts, texts, answers, strict=True)
        ]
        metrics = {
            f"{kind}_{name}": (exact_B * weights_B).sum()
            for kind in KINDS
            for name, exact_B in zip(NAMES, found[kind], strict=True)
        }
        return Sums((_mean_loss(judged) * weights_B).sum(), weights_B.sum(), metrics)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Shares of answers that a model gives to the token, by what it reads before the anchor.

        latent: what the sample's source was made into; zero_prefix: zeros in its place; shuffled_prefix:
        what another sample's source was made into; text_budget: the last tokens of the source, as many as
        there are latents; text: the whole source.
        """
        figures = {f"{kind}_{name}": means[f"{kind}_{name}"] for kind in KINDS for name in NAMES}
        return {"samples": means["count"], "loss": means["loss"]} | figures

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Of the model that answers worse."""
        return min(evaluation[f"latent_{name}"] for name in NAMES)

    def weights(self) -> list[Tensor]:
        """Of the frozen models, each on its device."""
        return [weight for lm in self.frozen for weight in lm.weights()]

    def _columns(self, targets_BN: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Answers and whole texts, where they are read, and the bytes of other sources."""
        answer_a, text_a, answer_b, text_b, others = torch.split(targets_BN, list(self._spec.columns), dim=1)
        a, b = (part.device for part in self._parts)
        return (answer_a.to(a), answer_b.to(b)), (text_a.to(a), text_b.to(b)), others

    def _answered(self, prefixes: Sequence[Tensor], answers: Sequence[Tensor]) -> list[_Judged]:
        """Figures are where the prefixes are."""
        home = prefixes[0].device
        # All go out before any is read and come back after all are: a device takes up a copy in its turn,
        # and the second model would wait until the first has answered.
        given = [prefix.to(part.device) for part, prefix in zip(self._parts, prefixes, strict=True)]
        judged = [
            _judged(part, prefix_BMC, answer_BL, first_weight=self._first_weight)
            for part, prefix_BMC, answer_BL in zip(self._parts, given, answers, strict=True)
        ]
        return [_Judged(each.loss_B.to(home), each.exact_B.to(home)) for each in judged]


def _judged(part: _Part, prefix_BMC: Tensor, answer_BL: Tensor, *, first_weight: float) -> _Judged:
    """What the model says after prefix and anchor, each token after the right ones before it."""
    lm, length = part.lm, answer_BL.shape[1]
    anchor_BL = part.anchor.expand(len(answer_BL), -1)
    known_BT = torch.cat((anchor_BL, answer_BL[:, :-1].clamp(min=0)), dim=1)
    # As loud as tokens are, whatever the model.
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
    return _Judged(loss_B, right_BL.all(dim=1))


def _mean_loss(judged: Sequence[_Judged]) -> Tensor:
    return torch.stack([each.loss_B for each in judged]).mean(dim=0)


def _reads(lm: FrozenLM, text_BT: Tensor, answer_BL: Tensor) -> Tensor:
    """Whether `lm` ends each text, which ends in its answer, with that answer: (B,)."""
    logits_BTV = lm.logits(lm.embed(text_BT[:, :-1].clamp(min=0)))
    following_BT = text_BT[:, 1:]
    place_T = torch.arange(1, text_BT.shape[1], device=text_BT.device)
    start_B1 = _count(text_BT) - _count(answer_BL)
    asked_BT = (place_T >= start_B1) & (following_BT != IGNORED)
    return ((logits_BTV.argmax(dim=2) == following_BT) | ~asked_BT).all(dim=1)


def _last_tokens(text_BT: Tensor, answer_BL: Tensor, *, tokens: int) -> Tensor:
    """The last `tokens` tokens before the answer, and the answer."""
    end_B1 = _count(text_BT)
    start_B1 = (end_B1 - _count(answer_BL) - tokens).clamp(min=0)
    width = min(tokens + answer_BL.shape[1], text_BT.shape[1])
    place_BW = start_B1 + torch.arange(width, device=text_BT.device)
    cut_BW = text_BT.gather(1, place_BW.clamp(max=text_BT.shape[1] - 1))
    return torch.where(place_BW < end_B1, cut_BW, IGNORED)


def _count(tokens_BT: Tensor) -> Tensor:
    """Tokens that are there: (B, 1)."""
    return (tokens_BT != IGNORED).sum(dim=1, keepdim=True)
