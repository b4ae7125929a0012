"""Training of a prefix that two frozen language models read in place of a text.

The input of each model is prefix, anchor and answer; the loss is on the answer. If all tokens of an answer
are predicted correctly, greedy decoding writes that answer, so exact match needs no decoding. Each model may
be on devices of its own, which divide the samples; losses return to the device of the trained model, and
autograd moves the gradients. Or both wait in main memory, and each is on the device for its pass only.

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
from train.tasks.base import Figures, Forward, Sums, count_of, refuse_label_smoothing, weighted_sum
from train.tasks.bridge.frozen import Copies, FrozenLM, FrozenPair
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


def build(options: Options, spec: Spec, *, config: Config, prepared: tuple[Copies, Copies] | None) -> Bridge:
    """Return the task. Raises ConfigError for label smoothing."""
    assert isinstance(spec, AnswerSpec) and prepared is not None
    refuse_label_smoothing(config, "tokens")
    return Bridge(spec, prepared, first_token_weight=options.first_token_weight)


def figures(_: Options, __: Spec) -> Figures:
    """Return the names of the figures."""
    return Figures(("loss", *(f"{kind}_{name}" for kind in KINDS for name in NAMES)))


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


class _Copy(NamedTuple):
    """A copy of one of the two models with the tokens of its anchor."""

    lm: FrozenLM
    anchor: Tensor
    device: torch.device


class _Share(NamedTuple):
    """A copy, and its rows of each tensor of a micro-batch, on its device."""

    copy: _Copy
    rows: tuple[Tensor, ...]


class Bridge:
    """Task of a model such as models/latentwire: bytes to a prefix for each frozen model."""

    targets_per_sample = 1

    def __init__(self, spec: AnswerSpec, frozen: tuple[Copies, Copies], *, first_token_weight: float) -> None:
        """first_token_weight: of the first token's loss, added to the mean over the answer."""
        self.frozen = [lm for copies in frozen for lm in copies]
        self._spec, self._first_weight = spec, first_token_weight
        self._branches = [
            [
                _Copy(lm, torch.tensor(side.anchor).to(lm.embedding_rms.device), lm.embedding_rms.device)
                for lm in copies
            ]
            for side, copies in zip(spec.sides, frozen, strict=True)
        ]

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
        columns = zip(prefixes, zeros, shuffled, answers, texts, strict=True)
        tokens = prefixes[0].shape[1]
        given = [_shared(copies, *each) for copies, each in zip(self._branches, columns, strict=True)]
        branches = [self._evaluate(shares, tokens=tokens, home=home) for shares in given]
        metrics = {
            f"{kind}_{name}": (exact_B * weights_B).sum()
            for name, (_, exact) in zip(NAMES, branches, strict=True)
            for kind, exact_B in zip(KINDS, exact, strict=True)
        }
        loss_B = _mean_loss([scores for scores, _ in branches])
        return Sums((loss_B * weights_B).sum(), weights_B.sum(), metrics)

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

    def watch_weights(self, seen: Callable[[list[Tensor]], None]) -> None:
        """Call `seen` with the weights of the frozen models, and with each copy of those that wait."""
        for lm in self.frozen:
            lm.watch(seen)

    def _columns(self, targets_BN: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Split targets into answers, whole texts, and other samples' sources."""
        answer_a, text_a, answer_b, text_b, others = torch.split(targets_BN, list(self._spec.columns), dim=1)
        return (answer_a, answer_b), (text_a, text_b), others

    def _score_all(self, prefixes: Sequence[Tensor], answers: Sequence[Tensor]) -> list[_AnswerScores]:
        """Score the answers after each prefix, on the device of the prefixes."""
        home = prefixes[0].device
        # All inputs are copied first and scores last, so that the models run concurrently.
        given = [
            _shared(copies, prefix, answer)
            for copies, prefix, answer in zip(self._branches, prefixes, answers, strict=True)
        ]
        scores = [[_scored(share, first_weight=self._first_weight) for share in shares] for shares in given]
        return [_joined(each, home) for each in scores]

    def _evaluate(
        self, shares: Sequence[_Share], *, tokens: int, home: torch.device
    ) -> tuple[_AnswerScores, list[Tensor]]:
        """Return a model's scores with the latents, and exact match by KINDS.

        shares: of latents, zeros, latents of other samples, answers and texts. tokens: latents of a sample.
        """
        scores, exact = list[_AnswerScores](), list[list[Tensor]]()
        for (lm, anchor, _), (*prefixes, answer_BL, text_BT) in shares:
            with lm.resident():
                of_kinds = [
                    _score(lm, anchor, prefix, answer_BL, first_weight=self._first_weight)
                    for prefix in prefixes
                ]
                last_BW = _last_tokens(text_BT, answer_BL, tokens=tokens + anchor.numel())
                read = [_reads(lm, seen, answer_BL) for seen in (last_BW, text_BT)]
            scores.append(of_kinds[0])
            exact.append([*(each.exact_B for each in of_kinds), *read])
        joined = [torch.cat([part.to(home) for part in parts]) for parts in zip(*exact, strict=True)]
        return _joined(scores, home), joined


def _shared(copies: Sequence[_Copy], *tensors: Tensor) -> list[_Share]:
    """Divide the rows of `tensors` among the copies of a model; fewer rows leave the last ones idle."""
    parts = zip(*(tensor.tensor_split(len(copies)) for tensor in tensors), strict=True)
    return [
        _Share(copy, tuple(part.to(copy.device) for part in rows))
        for copy, rows in zip(copies, parts, strict=True)
        if len(rows[0])
    ]


def _joined(scores: Sequence[_AnswerScores], home: torch.device) -> _AnswerScores:
    return _AnswerScores(
        *(torch.cat([part.to(home) for part in parts]) for parts in zip(*scores, strict=True))
    )


def _scored(share: _Share, *, first_weight: float) -> _AnswerScores:
    """Score a copy's rows of prefix and answer."""
    (lm, anchor, _), (prefix_BMC, answer_BL) = share
    if not lm.waits:
        return _score(lm, anchor, prefix_BMC, answer_BL, first_weight=first_weight)
    return _AnswerScores(*_Visit.apply(prefix_BMC, lm, anchor, answer_BL, first_weight))  # type: ignore[no-untyped-call]


class _Visit(torch.autograd.Function):
    """Scores of a model that is on the device for its forward and backward pass only.

    A sample's loss depends on its own prefix alone, so that its gradient is known before the weight of the
    sample in the whole loss is.
    """

    @staticmethod
    def forward(
        ctx: Any, prefix_BMC: Tensor, lm: FrozenLM, anchor: Tensor, answer_BL: Tensor, first_weight: float
    ) -> tuple[Tensor, Tensor]:
        own_BMC = prefix_BMC.detach().requires_grad_(prefix_BMC.requires_grad)
        with lm.resident(), torch.set_grad_enabled(prefix_BMC.requires_grad):
            loss_B, exact_B = _score(lm, anchor, own_BMC, answer_BL, first_weight=first_weight)
            if prefix_BMC.requires_grad:
                with torch.autocast(loss_B.device.type, enabled=False):
                    ctx.save_for_backward(*torch.autograd.grad(loss_B.sum(), own_BMC))
        ctx.mark_non_differentiable(exact_B)
        return loss_B.detach(), exact_B

    @staticmethod
    def backward(ctx: Any, loss_B: Tensor, _: Any) -> Any:
        (gradient_BMC,) = ctx.saved_tensors
        return gradient_BMC * loss_B[:, None, None], None, None, None, None


def _score(
    lm: FrozenLM, anchor: Tensor, prefix_BMC: Tensor, answer_BL: Tensor, *, first_weight: float
) -> _AnswerScores:
    """Score the answer after prefix and anchor with teacher forcing."""
    length = answer_BL.shape[1]
    anchor_BL = anchor.expand(len(answer_BL), -1)
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
