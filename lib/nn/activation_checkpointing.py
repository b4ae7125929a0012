"""Activation checkpointing: recompute activations in the backward pass (Chen et al. 2016).

A model runs its blocks through a `Chain`, which is configured from outside, like normalisation. Of a model
without one the blocks are the members of Sequentials and ModuleLists of the most frequent class. Gradients
are the same to the bit, and updates of buffers (the running statistics of normalisation) happen once.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.distributed.fsdp import blocks_of
from lib.errors import ConfigError

Recompute: TypeAlias = Literal["none", "blocks", "all"]
CHOICES: tuple[Recompute, ...] = ("none", "blocks", "all")  # each saves less than the one before
Block: TypeAlias = Callable[[Tensor], Tensor]  # a module if it has buffers


class Chain(nn.Module):
    """Sequence of blocks with checkpointing. Blocks are arguments, so that names of weights do not change.

    recompute: "none" saves what every operation saves; "blocks" saves the input of each block; "all"
    saves the input of each group of about sqrt(n) of n blocks: the inputs of its blocks are recomputed
    first, then the blocks one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recompute: Recompute = "none"

    def extra_repr(self) -> str:
        """Return the mode of recomputation."""
        return f"recompute={self.recompute}"

    def forward(self, x: Tensor, *blocks: Block) -> Tensor:
        """Apply `blocks` to `x` in order."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return _one_by_one(blocks, x)
        if self.recompute == "blocks":
            return _each_again(blocks, x)
        size = math.isqrt(len(blocks) - 1) + 1
        for start in range(0, len(blocks), size):
            x = _again(_each_again, blocks[start : start + size], x)
        return x


class _Recomputed(nn.Module):
    """Mix-in for a block of a model without a chain."""

    recompute = False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if not self.recompute or not torch.is_grad_enabled():
            return super().forward(*arguments, **named)
        return _checkpointed(super().forward, (self,), *arguments, **named)


def configure_recomputation(model: nn.Module, recompute: Recompute) -> bool:
    """Set the mode of every chain of `model`, or of the blocks of a model without a chain.

    Returns true if there are such blocks, and gradients have to be checked. Raises ConfigError if there is
    neither.
    """
    chains = [module for module in model.modules() if isinstance(module, Chain)]
    blocks = [] if chains or recompute == "none" else _blocks_without_chain(model)
    if recompute != "none" and not chains and (recompute == "all" or not blocks):
        loop = f"{type(model).__name__} runs no blocks through lib.nn.activation_checkpointing.Chain"
        raise ConfigError(
            f"CONFIG_GRAD_CHECKPOINT_{recompute.upper()}=y is not possible",
            why=loop if blocks else f"{loop}, and has no list of blocks of one class",
            todo=f"set CONFIG_GRAD_CHECKPOINT_{'BLOCKS' if blocks else 'NONE'}=y",
        )
    for chain in chains:
        chain.recompute = recompute
    kinds = {kind: type(f"Recomputed{kind.__name__}", (_Recomputed, kind), {}) for kind in map(type, blocks)}
    for block in blocks:
        block.__class__ = kinds[type(block)]  # one for all, so that they share a compiled program
        vars(block)["recompute"] = True
    return bool(blocks)


def stop_recomputing(model: nn.Module) -> None:
    """Let blocks without a chain save what every operation saves again."""
    for module in model.modules():
        if isinstance(module, _Recomputed):
            vars(module)["recompute"] = False


def _blocks_without_chain(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the most frequent class; [] where there are not two of one class."""
    blocks = blocks_of(model)
    kind, count = max(Counter(map(type, blocks)).items(), key=lambda one: one[1], default=(nn.Module, 0))
    return [block for block in blocks if type(block) is kind] if count > 1 else []


def _one_by_one(blocks: Sequence[Block], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _each_again(blocks: Sequence[Block], x: Tensor) -> Tensor:
    for block in blocks:
        x = _again(_one_by_one, (block,), x)
    return x


def _again(run: Callable[[Sequence[Block], Tensor], Tensor], blocks: Sequence[Block], x: Tensor) -> Tensor:
    """Checkpoint `run` of the blocks on `x`: save only `x`, and run them again in the backward pass."""
    return _checkpointed(lambda x: run(blocks, x), blocks, x)  # type: ignore[no-any-return]


def _checkpointed(run: Callable[..., Any], blocks: Sequence[object], *arguments: Any, **named: Any) -> Any:
    """Checkpoint `run`, which runs `blocks`: save only its arguments."""
    if torch.compiler.is_compiling():
        # The compiler keeps updates of buffers out of what it recomputes.
        return checkpoint(run, *arguments, use_reentrant=False, **named)

    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        return contextlib.nullcontext(), _CopiedBuffers(blocks)

    return checkpoint(run, *arguments, use_reentrant=False, context_fn=contexts, **named)


class _CopiedBuffers(contextlib.AbstractContextManager[None]):
    """Replace the buffers of `blocks` by copies within the context, so that updates are discarded."""

    def __init__(self, blocks: Sequence[object]) -> None:
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
