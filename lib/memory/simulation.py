"""Running code on a device that is not there: tensors with shapes and no contents.

They are fake tensors of the CPU, for autograd on any other fake device wants that device's driver.
What a kernel of another device does differently (`lib.attention`, `lib.cross_entropy`) goes by `kernels_for`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lib.plan.types import Kind

_kind: ContextVar[Kind | None] = ContextVar("simulated kind of device", default=None)


@contextlib.contextmanager
def simulation(kind: Kind) -> Iterator[None]:
    """Within it, tensors that are made have no contents, and stand for tensors on a device of `kind`."""
    token = _kind.set(kind)
    try:
        # What comes from NumPy is real, and becomes fake in the first operation on it.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        _kind.reset(token)


def simulated() -> bool:
    """Whether tensors have no contents now."""
    return _kind.get() is not None


def kernels_for(tensor: Tensor) -> str:
    """The type of the device ("cpu", "cuda", "mps") that `tensor` is on, or stands for."""
    kind = _kind.get()
    if kind is None:
        return tensor.device.type
    return "cuda" if kind == "rocm" else kind


def lay_out(model: nn.Module, layout: torch.memory_format) -> None:
    """Give the 4-d weights of a simulated `model` that memory format. (Module.to refuses fake tensors.)"""
    changed: dict[int, nn.Parameter] = {}  # a weight may be in two places
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.dim() == 4:
                if id(weight) not in changed:
                    data = weight.detach().contiguous(memory_format=layout)
                    changed[id(weight)] = nn.Parameter(data, requires_grad=weight.requires_grad)
                module._parameters[name] = changed[id(weight)]
