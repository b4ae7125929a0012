"""Activation offloading to host memory: the last resort, because each tensor is copied twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lib.memory.simulation import simulated

SMALLEST_BYTES = 1 << 20  # smaller tensors stay: a copy costs more than it saves


class Offloading(torch.autograd.graph.saved_tensors_hooks):
    """Re-enterable context for forward passes of `model`.

    Tensors saved for backward within it are copied to host memory, bit for bit, and back when needed.
    Weights stay on the device, also those that autocast has converted; they are recognized by their shape,
    or that of their transpose, so that activations of such a shape stay, too. byte_count: copied so far, in
    one direction.
    """

    def __init__(self, model: nn.Module) -> None:
        self.byte_count = 0
        self._kept = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape[::-1]))}
        self._take = _forget if simulated() else _to_host
        super().__init__(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        shared = size > tensor.untyped_storage().nbytes()  # an expanded view of a smaller tensor
        if size < SMALLEST_BYTES or shared or tuple(tensor.shape) in self._kept:
            return tensor
        self.byte_count += size
        return self._take(tensor)


def _unpack(kept: Tensor | Callable[[], Tensor]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept()


def _to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Copy to host memory; return what copies back."""
    device = tensor.device
    # Pinned memory makes both copies asynchronous; they are in order, since both are on the current stream.
    host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
    host.copy_(tensor, non_blocking=True)
    # Without copy=True `to` would return the saved copy itself.
    return lambda: host.to(device, non_blocking=True, copy=device.type == "cpu")


def _forget(tensor: Tensor) -> Callable[[], Tensor]:
    """Offload in a simulation, where host memory is not counted."""
    shape, strides, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)
