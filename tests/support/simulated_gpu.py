"""A device that computes on the CPU and counts what a GPU would make its host wait for.

Its tensors are on a device of their own, with contents, so code takes the paths that it takes on a GPU:
`tensor.cpu()` is a copy that waits, and `torch.tensor(number, device=device)` one from pageable memory. Torch
registers such a device for the rest of a process: this module is imported in a process of its own only
(`tests/support/training_on_gpu.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from lib.nn.graph_lint import HOST_ASKS, INDEXED, SHAPE_OF_NUMBERS, UNIQUE, _is_mask

NAME = "simgpu"


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, _Module())
torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(number, device=...) makes it on the host and copies

DEVICE = torch.device(NAME, 0)
HOST = torch.device("cpu")
_COPIES = {"_to_copy", "copy_"}
_WAITS = HOST_ASKS | SHAPE_OF_NUMBERS | UNIQUE
_pinned: dict[int, Tensor] = {}  # by address; kept, so that no address is used again


class _OnDevice(Tensor):
    """A tensor on the device; `held` has its contents."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _OnDevice:
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: _OnDevice = Tensor._make_wrapper_subclass(cls, held.shape, device=DEVICE, **shape)
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class SimulatedGpu(TorchDispatchMode):
    """Context in which there is the device. waits: what its host waited for; sent: copies that it did not."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.sent = 0

    def __enter__(self) -> Any:
        self._pin_memory = Tensor.pin_memory
        Tensor.pin_memory = _pin  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Tensor.pin_memory = self._pin_memory  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", None)
        name = func.overloadpacket.__name__
        if name in _COPIES:
            self._count_copy(name, args, kwargs)
        elif _on_device((args, kwargs)) and (name in _WAITS or (name in INDEXED and _is_mask_within(args))):
            self.waits[f"{name} waits for values"] += 1
        elif name in INDEXED and _on_device(args) and _from_host(args):
            self.waits[f"{name} copies places from pageable memory"] += 1
        result = _run(func, args, kwargs)
        return _pin(result) if pinned else result

    def _count_copy(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        if name == "copy_":
            target, source, *rest = args
            device = target.device
            blocking = not (rest[0] if rest else kwargs.get("non_blocking", False))
        else:
            source, device = args[0], kwargs.get("device") or args[0].device
            blocking = not kwargs.get("non_blocking", False)
        if source.device.type == device.type:
            return
        if device.type == "cpu":
            self.waits["copy to the host"] += 1
        elif source.untyped_storage().data_ptr() not in _pinned:
            self.waits["copy from pageable memory"] += 1
        elif blocking:
            self.waits["blocking copy from pinned memory"] += 1
        else:
            self.sent += 1


def _pin(tensor: Tensor, _device: object = None) -> Tensor:
    copy = tensor.clone() if tensor.numel() else tensor
    _pinned[copy.untyped_storage().data_ptr()] = copy
    return copy


def _on_device(values: Any) -> bool:
    return any(isinstance(leaf, _OnDevice) for leaf in tree_leaves(values))


def _from_host(values: Any) -> bool:
    return any(
        isinstance(leaf, Tensor) and leaf.device == HOST and leaf.dim() for leaf in tree_leaves(values)
    )


def _is_mask_within(values: Any) -> bool:
    return any(map(_is_mask, values))


def _held(value: Any) -> Any:
    if isinstance(value, torch.device):
        return HOST
    return value.held if isinstance(value, _OnDevice) else value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    on_device = _on_device((args, kwargs)) if device is None else torch.device(device).type == NAME
    name = func.overloadpacket.__name__
    if name == "copy_":
        on_device = isinstance(args[0], _OnDevice)
    result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if name == "_conj":  # a wrapper has no such bit, and what follows would take the contents as they are
        result = result.resolve_conj()
    if name == "_to_copy" and device is not None and isinstance(args[0], _OnDevice) != on_device:
        result = result.clone() if result is _held(args[0]) else result
    if not on_device:
        return result
    wrapped = tree_map(lambda each: _OnDevice(each) if isinstance(each, Tensor) else each, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)
