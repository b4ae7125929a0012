"""Interface of models that can be a pipeline of stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from lib.plan.types import StageFacts, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Parts of a model: its forward pass is `last(chain(first(inputs), *blocks), inputs)`.

    last: also takes the targets if the forward pass does.
    chain: applies blocks in order, perhaps with recomputation (lib.nn.activation_checkpointing.Chain).
    first_weights, last_weights: of the parts before and after the blocks; a tied weight is in both.
    channels: the hidden states of inputs (B, T) are (B, T, channels).
    """

    first: Callable[[Tensor], Tensor]
    chain: Callable[..., Tensor]
    blocks: tuple[nn.Module, ...]
    last: Callable[..., Tensor]
    first_weights: tuple[Tensor, ...]
    last_weights: tuple[Tensor, ...]
    channels: int


@runtime_checkable
class HasStages(Protocol):
    """A model that can be a pipeline. Its blocks are alike, and it has no buffers."""

    def pipeline_stages(self) -> Stages:
        """Return the parts of a pipeline."""


def stage_facts(model: nn.Module, input_shape: tuple[int, ...]) -> StageFacts | None:
    """Return what planning needs to know of the ends of a pipeline; None for other models."""
    if not isinstance(model, HasStages):
        return None
    parts, ends = model.pipeline_stages(), list[tuple[Weight, ...]]()
    for weights in (parts.first_weights, parts.last_weights):
        ends.append(tuple(Weight(tuple(each.shape), each.requires_grad) for each in weights))
    every = {id(each): each.numel() for each in parts.first_weights + parts.last_weights}
    tied = sum(each.elements for end in ends for each in end) - sum(every.values())
    sent = 4 * input_shape[0] * parts.channels
    return StageFacts(first=ends[0], last=ends[1], tied=tied, bytes_per_sample=sent)
