"""Simulated devices: code runs on fake tensors, which have shapes and no contents.

They are fake tensors of the CPU, because autograd on any other fake device needs that device's driver.
Kernels that differ on another device (attention, cross-entropy) are chosen by `kernels_for`.
"""

from __future__ import annotations

import contextlib
import logging
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lib.plan.types import Kind

# Operators by their treatment under autocast on CUDA, where it differs from the CPU's.
AUTOCAST_ON_CUDA: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("autocast_cuda.toml").read_text("utf-8")
)
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)  # types that autocast converts
_REGION = torch.autocast.__init__

_kind: Kind | None = None  # a plain global, which torch.compile can read


@contextlib.contextmanager
def simulation(kind: Kind) -> Iterator[None]:
    """Make new tensors fake, standing for tensors on a device of `kind`, within the context."""
    from lib.memory.fake_mode import QuickFakeMode  # slow import

    global _kind
    outer, _kind = _kind, kind
    try:
        # Errors of operations are raised; torch would also log its own traceback.
        quiet = replaced(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)
        with (
            QuickFakeMode(),
            replaced(torch.utils, swap_tensors=_take_over),
            replaced(nn.init, _no_grad_trunc_normal_=lambda tensor, *_, **__: tensor),  # draws until all fit
            _updates_without_contents(),
            _kernels_of(kind),
            quiet,
        ):
            yield
    finally:
        _kind = outer


@contextlib.contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set own `attributes` of `owner` within the context, and restore them afterwards."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _take_over(one: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors of which `other` is dropped, as in Module.to, half and their like.

    torch's own refuses where there is a weak reference to a tensor, as there is to simulated ones.
    """
    one.data = other


@contextlib.contextmanager
def _updates_without_contents() -> Iterator[None]:
    """Replace an update that has no meta kernel: torch would run it on zeros of full size."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_sgd_", "Meta"):
            library.impl("_fused_sgd_", lambda *_, **__: None, "Meta")
        yield


@contextlib.contextmanager
def _kernels_of(kind: Kind) -> Iterator[None]:
    """Select kernels and the precision under autocast by `kind`, where torch selects by device."""
    if kind not in ("cuda", "rocm"):
        yield
        return
    from lib.memory.cuda_attention import attention_on_cuda  # both only where they are used
    from lib.memory.recurrent import RECURRENT

    # Not by a mode of torch: modes are off in a backward pass, where activations are recomputed.
    kernels = replaced(F, scaled_dot_product_attention=attention_on_cuda, dropout=_dropout_on_cuda)
    recurrent = replaced(torch._VF, **RECURRENT)
    regions = replaced(torch.autocast, __init__=_region_on_cuda)
    with kernels, recurrent, regions, torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in AUTOCAST_ON_CUDA["unchanged"]:
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        for group, dtype_of in (("half", _half), ("fp32", lambda _: torch.float32), ("widest", _widest)):
            for name in AUTOCAST_ON_CUDA[group]:
                library.impl(name, _copied(name, dtype_of), "AutocastCPU")
        for name in AUTOCAST_ON_CUDA["fp32_inside"]:
            library.impl(name, _fp32_inside(name), "AutocastCPU")
        library.impl("binary_cross_entropy", _refused, "AutocastCPU")
        yield


def _region_on_cuda(
    self: torch.autocast, device_type: str, dtype: Any = None, *more: Any, **rest: Any
) -> None:
    """A region of autocast for CUDA, which without a driver torch would ignore, on the simulated device."""
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.float16
    _REGION(self, device_type, dtype, *more, **rest)


def _operator(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def _fp32_inside(name: str) -> Callable[..., Any]:
    operator = _operator(name)
    names = [argument.name for argument in operator._schema.arguments]  # type: ignore[attr-defined]
    # Of the types in CUDA's list, only this one has a kernel with another output type.
    fused = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}.get(name)

    def run(*arguments: Any, **options: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **options}
        x, dtype = given["self"], given.get("dtype")
        if dtype is None and x.dtype in _FLOATING:
            given["dtype"] = dtype = torch.float32
        with torch.autocast("cpu", enabled=False):
            if fused is not None and (x.dtype, dtype) == (torch.float16, torch.float32):
                return _operator(fused)(x, given["dim"], True)
            return operator(**given)

    return run


def _copied(name: str, dtype_of: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    """Wrap the operator `name` to cast its floating-point tensors to one type, as autocast does."""
    operator = _operator(name)

    def is_cast(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in _FLOATING

    def run(*arguments: Any, **options: Any) -> Any:
        dtype = dtype_of([value for value in tree_leaves((arguments, options)) if is_cast(value)])
        arguments, options = tree_map(
            lambda value: value.to(dtype) if is_cast(value) else value, (arguments, options)
        )
        with torch.autocast("cpu", enabled=False):
            return operator(*arguments, **options)

    return run


def _half(_: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return torch.float32 if any(tensor.dtype == torch.float32 for tensor in tensors) else _half(tensors)


def _refused(*_: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on CUDA; "
        "use binary_cross_entropy_with_logits"
    )


def _dropout_on_cuda(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
    """One kernel whose mask takes a byte per element."""
    if not training or p == 0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def simulated() -> bool:
    """Return True inside a simulation, where tensors have no contents."""
    return _kind is not None


def kernels_for(tensor: Tensor) -> str:
    """Return the device type ("cpu", "cuda", "mps") that `tensor` is on, or stands for."""
    if _kind is None:
        return tensor.device.type
    return "cuda" if _kind == "rocm" else _kind
