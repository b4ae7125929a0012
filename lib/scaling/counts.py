"""What a model is made of, and what a token costs it: counted on the meta device, without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

HEAD = "head"  # the name of a head that is not the embedding


@runtime_checkable
class HasIdleParameters(Protocol):
    """A module, such as one of experts, that a token passes in part."""

    def idle_parameters(self) -> int:
        """Those that a token does not pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Parameters. nonembedding: neither embeddings nor the head. active: of those, what one token passes."""

    total: int
    nonembedding: int
    active: int


def count(build: Callable[[], nn.Module]) -> Counts:
    """Of the model that `build` makes on torch's default device, which is "meta" while it is called."""
    with torch.device("meta"):
        model = build()
    total = sum(parameter.numel() for parameter in model.parameters())
    outside: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside += [module for name, module in model.named_children() if name == HEAD]
    embedded = {id(parameter): parameter.numel() for module in outside for parameter in module.parameters()}
    nonembedding = total - sum(embedded.values())
    idle = sum(
        module.idle_parameters() for module in model.modules() if isinstance(module, HasIdleParameters)
    )
    return Counts(total=total, nonembedding=nonembedding, active=nonembedding - idle)


def training_flops(build: Callable[[], nn.Module], *, block_size: int) -> int:
    """Operations of training on one token, forward and backward: those of matrix products and attention.

    The head and attention are counted, which 6 N leaves out; what is computed element by element is not.
    """
    with torch.device("meta"):
        model = build()
        tokens = torch.zeros(1, block_size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    flops: int = counter.get_total_flops()
    return 3 * flops // block_size
