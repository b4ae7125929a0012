"""Running code on a device that is not there: tensors with shapes and no contents.

They are fake tensors of the CPU, for autograd on any other fake device wants that device's driver.
What a kernel of another device does differently (`lib.attention`, `lib.cross_entropy`) goes by `kernels_for`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.plan.types import Kind

# What autocast computes in single precision on CUDA (ATen/autocast_mode.h) and leaves in half on a CPU.
FP32_ON_CUDA = (
    "layer_norm", "group_norm", "rms_norm", "renorm", "dist", "logsumexp", "softplus",
    "exp", "expm1", "log", "log1p", "log2", "log10", "reciprocal", "rsqrt",
    "acos", "asin", "cosh", "erfinv", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "cosine_similarity",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
# What it has the kernel itself compute so, without a copy of the input.
FP32_INSIDE_ON_CUDA = (
    "softmax.int", "log_softmax.int", "linalg_vector_norm", "sum", "sum.dim_IntList", "cumsum", "cumprod",
)  # fmt: skip
# What it copies to single precision on a CPU, and leaves alone on CUDA.
UNCHANGED_ON_CUDA = (
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "avg_pool3d", "adaptive_avg_pool3d", "max_pool3d", "adaptive_max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d",
)  # fmt: skip

_ATTENTION = F.scaled_dot_product_attention

_kind: Kind | None = None  # a plain name, which a compiler can read


@contextlib.contextmanager
def simulation(kind: Kind) -> Iterator[None]:
    """Within it, tensors that are made have no contents, and stand for tensors on a device of `kind`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes long to load

    global _kind
    outer, _kind = _kind, kind
    try:
        # What comes from NumPy is real, and becomes fake in the first operation on it.
        with FakeTensorMode(allow_non_fake_inputs=True), _updates_without_contents(), _kernels_of(kind):
            yield
    finally:
        _kind = outer


@contextlib.contextmanager
def _updates_without_contents() -> Iterator[None]:
    """Torch cannot tell shapes of this one, and would run it on zeros of full size."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_sgd_", "Meta"):
            library.impl("_fused_sgd_", lambda *_, **__: None, "Meta")
        yield


@contextlib.contextmanager
def _kernels_of(kind: Kind) -> Iterator[None]:
    """What torch chooses by the device, chosen by `kind`: kernels, and the precision under autocast."""
    if kind not in ("cuda", "rocm"):
        yield
        return
    # Not by a mode of torch: those are off in a backward pass, where activations are computed again.
    kernels = mock.patch.multiple(
        F, scaled_dot_product_attention=_attention_on_cuda, dropout=_dropout_on_cuda
    )
    with kernels, torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in UNCHANGED_ON_CUDA:
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        for name in FP32_ON_CUDA:
            library.impl(name, _in_fp32(name), "AutocastCPU")
        for name in FP32_INSIDE_ON_CUDA:
            library.impl(name, _fp32_inside(name), "AutocastCPU")
        yield


def _operator(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def _fp32_inside(name: str) -> Callable[..., Any]:
    # A softmax of half precision would be copied on a CPU; these are what CUDA's dispatch to.
    fused = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}.get(name)
    operator = _operator(fused or name)

    def run(x: Tensor, *arguments: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            half = x.dtype in (torch.bfloat16, torch.float16)
            if fused is None:
                return operator(x, *arguments, dtype=dtype or (torch.float32 if half else None), **options)
            if half and dtype in (None, torch.float32):
                return operator(x, arguments[0], True)
            return _operator(name)(x, *arguments, dtype=dtype, **options)

    return run


def _in_fp32(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def exact(value: Any) -> Any:
        is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if is_half else value

    def run(*arguments: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(*map(exact, arguments), **{key: exact(value) for key, value in options.items()})

    return run


def _attention_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In (B, H, T, D): the flash kernel in half precision without a mask, else the memory-efficient one."""
    if query.dim() != 4:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(shared, -3) for part in (key, value))
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, **options)[0]  # type: ignore[no-any-return]
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        attn_mask = attn_mask.to(query.dtype).expand(shape)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, **options)[0]  # type: ignore[no-any-return]


def _dropout_on_cuda(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: ARG001
    """One kernel with a mask of a byte for each element."""
    if not training or p == 0:
        return input
    dropped: Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def simulated() -> bool:
    """Whether tensors have no contents now."""
    return _kind is not None


def kernels_for(tensor: Tensor) -> str:
    """The type of the device ("cpu", "cuda", "mps") that `tensor` is on, or stands for."""
    if _kind is None:
        return tensor.device.type
    return "cuda" if _kind == "rocm" else _kind


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
