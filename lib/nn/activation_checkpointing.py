"""Activations that are computed again in the backward pass instead of being kept (Chen et al. 2016).

A model runs its blocks through a `Chain`; what the chain keeps of them is configured from outside, as
that of normalisation is. Gradients are the same to the bit, and what a block does to its buffers (the
running statistics of normalisation) happens once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.errors import ConfigError

Recompute: TypeAlias = Literal["none", "blocks", "all"]
CHOICES: tuple[Recompute, ...] = ("none", "blocks", "all")  # each keeps less than the one before
Block: TypeAlias = Callable[[Tensor], Tensor]  # a module where it has buffers


class Chain(nn.Module):
    """Runs blocks one after the other. It does not hold them: the names of a model's weights stay.

    recompute: "none" keeps what every operation wants to be kept; "blocks" keeps what enters each
    block; "all" keeps what enters each group of about sqrt(n) of n blocks, whose blocks' inputs are
    computed again first and the blocks then one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recompute: Recompute = "none"

    def extra_repr(self) -> str:
        return f"recompute={self.recompute}"

    def forward(self, x: Tensor, *blocks: Block) -> Tensor:
        """What the last block makes of what the others make of `x`."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return _one_by_one(blocks, x)
        if self.recompute == "blocks":
            return _each_again(blocks, x)
        size = math.isqrt(len(blocks) - 1) + 1
        for start in range(0, len(blocks), size):
            x = _again(_each_again, blocks[start : start + size], x)
        return x


def configure_recomputation(model: nn.Module, recompute: Recompute) -> None:
    """Have every chain of `model` keep what `recompute` says.

    Raises ConfigError where it has none.
    """
    chains = [module for module in model.modules() if isinstance(module, Chain)]
    if recompute != "none" and not chains:
        raise ConfigError(
            f"CONFIG_GRAD_CHECKPOINT_{recompute.upper()}=y cannot be honoured",
            why=f"{type(model).__name__} runs no blocks through lib.nn.activation_checkpointing.Chain",
            todo="set CONFIG_GRAD_CHECKPOINT_NONE=y",
        )
    for chain in chains:
        chain.recompute = recompute


def _one_by_one(blocks: Sequence[Block], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _each_again(blocks: Sequence[Block], x: Tensor) -> Tensor:
    for block in blocks:
        x = _again(_one_by_one, (block,), x)
    return x


def _again(run: Callable[[Sequence[Block], Tensor], Tensor], blocks: Sequence[Block], x: Tensor) -> Tensor:
    """`run` the blocks on `x`, keep `x` alone, and run them again when their gradients are due."""

    def of_x(x: Tensor) -> Tensor:
        return run(blocks, x)

    if torch.compiler.is_compiling():
        # The compiler takes what happens to buffers out of what it computes twice.
        return checkpoint(of_x, x, use_reentrant=False)  # type: ignore[no-any-return]

    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), _CopiedBuffers(blocks)

    return checkpoint(of_x, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


class _CopiedBuffers(contextlib.AbstractContextManager[None]):
    """Within it the buffers of `blocks` are copies, so that what is done to them is forgotten."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        modules = [module for block in blocks if isinstance(block, nn.Module) for module in block.modules()]
        self._modules = [module for module in modules if module._buffers]
        self._own: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._own = [dict(module._buffers) for module in self._modules]
        for module, own in zip(self._modules, self._own, strict=True):
            for name, buffer in own.items():
                module._buffers[name] = None if buffer is None else buffer.clone()

    def __exit__(self, *_: object) -> None:
        for module, own in zip(self._modules, self._own, strict=True):
            module._buffers.update(own)
