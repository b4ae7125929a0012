"""Activation offloading to host memory: the last resort, because each tensor is copied twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lib.memory.simulation import simulated

SMALLEST_BYTES = 1 << 20  # smaller tensors stay: a copy costs more than it saves

Pack: TypeAlias = Callable[[Tensor], Any]


def offloading(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a re-enterable context for forward passes of `model`.

    Tensors saved for backward within it are copied to host memory, bit for bit, and back when needed.
    Weights stay on the device, also those that autocast has converted; they are recognized by their shape,
    or that of their transpose, so that activations of such a shape stay, too.
    """
    shapes = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape[::-1]))}
    take = _forget if simulated() else _to_host

    def pack(tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        shared = size > tensor.untyped_storage().nbytes()  # an expanded view of a smaller tensor
        if size < SMALLEST_BYTES or shared or tuple(tensor.shape) in shapes:
            return tensor
        return take(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


@dataclass(frozen=True, slots=True)
class _Away:
    """Placeholder that autograd saves in place of an offloaded tensor."""

    fetch: Callable[[], Tensor]


def _unpack(kept: Tensor | _Away) -> Tensor:
    return kept.fetch() if isinstance(kept, _Away) else kept


def _to_host(tensor: Tensor) -> _Away:
    device = tensor.device
    # Pinned memory makes both copies asynchronous; they are in order, since both are on the current stream.
    host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
    host.copy_(tensor, non_blocking=True)
    # Without copy=True `to` would return the saved copy itself.
    return _Away(lambda: host.to(device, non_blocking=True, copy=device.type == "cpu"))


def _forget(tensor: Tensor) -> _Away:
    """Offload in a simulation, where host memory is not counted."""
    shape, strides, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return _Away(lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device))
