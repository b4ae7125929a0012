"""Exponential moving average of the weights, to evaluate in place of the last weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lib.distributed.fsdp import from_local, local, shard_of


def decay_for(decay: float, *, effective_batch: int, base_batch: int | None) -> float:
    """Scale a decay chosen for `base_batch`: to the power of k if each step takes k times as many samples.

    (Busbridge et al. 2023.) The averaging window is then about the same in samples. None: unchanged.
    """
    return decay if base_batch is None else decay ** (effective_batch / base_batch)


def horizon(decay: float) -> float:
    """Return the averaging window in steps; the mean age of the averaged weights is one less."""
    return 1 / (1 - decay) if decay < 1 else math.inf  # 1 - decay may round to 0


class Ema:
    """Weight average: average <- decay * average + (1 - decay) * weights, once per optimizer step.

    The averages start at the current weights of `model` and are stored beside them. Buffers (the
    running statistics of batch normalisation) are not averaged: the model's are used with both.
    """

    def __init__(self, model: nn.Module, *, decay: float, leave_out: Sequence[nn.Parameter] = ()) -> None:
        """leave_out: parameters that are not averaged either."""
        self._decay = decay
        without = {id(parameter) for parameter in leave_out}
        averaged = {name: weight for name, weight in model.named_parameters() if id(weight) not in without}
        self._all = frozenset(averaged)
        own = {name: weight for name, weight in averaged.items() if not weight.is_meta}  # of this stage
        self._names = list(own)
        self._weights: list[Tensor] = list(own.values())
        self._averages = [weight.clone() for weight in self._own()]
        self._inside = False

    @torch.no_grad()
    def update(self) -> None:
        """Update the average from the model's weights. Called after the optimizer's step."""
        assert not self._inside, "the model holds the averages, not its weights"
        if self._averages:
            torch._foreach_lerp_(self._averages, self._own(), 1 - self._decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the averages into the model within the context; its own weights are restored bit for bit.

        Values are copied and addresses stay, so that a compiled model needs no recompilation.
        """
        assert not self._inside, "the model already holds the averages"
        if not self._averages:
            yield
            return
        own = [weight.clone() for weight in self._own()]
        torch._foreach_copy_(self._own(), self._averages)
        self._inside = True
        try:
            yield
        finally:
            torch._foreach_copy_(self._own(), own)
            self._inside = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the names of their parameters: live tensors, not copies."""
        parts = map(from_local, self._averages, self._weights)
        return dict(zip(self._names, parts, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load averages from `state`. Raises KeyError if its names are not those of the model."""
        if set(state) != self._all:
            raise KeyError(f"averages do not fit the model: {sorted(set(state) ^ self._all)}")
        pairs = zip(self._names, self._weights, strict=True)
        torch._foreach_copy_(self._averages, [local(shard_of(state[name], weight)) for name, weight in pairs])

    def _own(self) -> list[Tensor]:
        """Local shards of this rank's weights, sharing their memory."""
        return [local(weight.detach()) for weight in self._weights]
