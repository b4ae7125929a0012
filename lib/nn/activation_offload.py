"""Activations that wait for the backward pass in main memory: the last resort, for each is copied twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lib.memory.simulation import simulated

SMALLEST_BYTES = 1 << 20  # what is smaller stays: a copy would take longer than it is worth

Pack: TypeAlias = Callable[[Tensor], Any]


def offloading(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """A context for forward passes of `model`, which may be entered again and again.

    What is saved for backward within it is copied to main memory, to the bit, and back when it is due.
    Weights stay, those that autocast has converted, too, which their shape tells.
    """
    shapes = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape[::-1]))}
    take = _forget if simulated() else _to_host

    def pack(tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        shared = size > tensor.untyped_storage().nbytes()  # a view that repeats a smaller tensor
        if size < SMALLEST_BYTES or shared or tuple(tensor.shape) in shapes:
            return tensor
        return take(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


@dataclass(frozen=True, slots=True)
class _Away:
    """What autograd keeps in place of a tensor, until the backward pass wants that back."""

    fetch: Callable[[], Tensor]


def _unpack(kept: Tensor | _Away) -> Tensor:
    return kept.fetch() if isinstance(kept, _Away) else kept


def _to_host(tensor: Tensor) -> _Away:
    device = tensor.device
    # From pinned memory a copy does not wait for the device; torch keeps such memory for the next time.
    host = torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda")
    host.copy_(tensor)
    # Otherwise `to` would hand out the copy that is kept.
    return _Away(lambda: host.to(device, non_blocking=True, copy=device.type == "cpu"))


def _forget(tensor: Tensor) -> _Away:
    """In a simulation main memory is not counted."""
    shape, strides, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return _Away(lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device))
