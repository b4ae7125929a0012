"""Running code on a device that is not there: tensors with shapes and no contents.

They are fake tensors of the CPU, for autograd on any other fake device wants that device's driver.
What a kernel of another device does differently (attention, cross-entropy) goes by `kernels_for`.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lib.plan.types import Kind

# Where autocast on CUDA (the lists of ATen/autocast_mode.h) does something else than on a CPU. It copies what
# these take to half precision,
HALF_ON_CUDA = (
    "_convolution", "_convolution.deprecated", "convolution", "addmv", "addr", "mv",
    "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention",
)  # fmt: skip
# what these take to single precision,
FP32_ON_CUDA = (
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "renorm", "dist", "pdist", "logsumexp",
    "exp", "expm1", "log", "log1p", "log2", "log10", "reciprocal", "rsqrt", "softplus",
    "acos", "asin", "cosh", "erfinv", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "cosine_similarity",
    "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "norm.Scalar", "norm.ScalarOpt_dim",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip
# and what these take to the widest type among it.
WIDEST_ON_CUDA = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
)  # fmt: skip
# It has these kernels themselves compute in single precision, where no other type is named, without a copy.
FP32_INSIDE_ON_CUDA = (
    "softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord",
)  # fmt: skip
# What a CPU copies to single precision, and CUDA leaves alone.
UNCHANGED_ON_CUDA = (
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
    "avg_pool3d", "adaptive_avg_pool3d", "max_pool3d", "adaptive_max_pool3d",
    "fractional_max_pool2d", "fractional_max_pool3d",
)  # fmt: skip

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)  # what autocast looks at
_ATTENTION = F.scaled_dot_product_attention

_kind: Kind | None = None  # a plain name, which a compiler can read


@contextlib.contextmanager
def simulation(kind: Kind) -> Iterator[None]:
    """Within it, tensors that are made have no contents, and stand for tensors on a device of `kind`."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes long to load

    global _kind
    outer, _kind = _kind, kind
    try:
        # What comes from NumPy is real, and becomes fake in the first operation on it. What an operation
        # refuses is raised: torch would log its own traceback besides.
        quiet = mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            _updates_without_contents(),
            _kernels_of(kind),
            quiet,
        ):
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
        for name in HALF_ON_CUDA:
            library.impl(name, _copied(name, lambda _: torch.get_autocast_dtype("cpu")), "AutocastCPU")
        for name in FP32_ON_CUDA:
            library.impl(name, _copied(name, lambda _: torch.float32), "AutocastCPU")
        for name in WIDEST_ON_CUDA:
            library.impl(name, _copied(name, _widest), "AutocastCPU")
        for name in FP32_INSIDE_ON_CUDA:
            library.impl(name, _fp32_inside(name), "AutocastCPU")
        library.impl("binary_cross_entropy", _refused, "AutocastCPU")
        yield


def _operator(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def _fp32_inside(name: str) -> Callable[..., Any]:
    operator = _operator(name)
    names = [argument.name for argument in operator._schema.arguments]  # type: ignore[attr-defined]
    # Of the types that CUDA reads, this one alone has a kernel that writes another one.
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
    """The operator `name` on copies, in one type, of the tensors that autocast looks at."""
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


def _widest(tensors: list[Tensor]) -> torch.dtype:
    half = torch.get_autocast_dtype("cpu")
    return torch.float32 if any(tensor.dtype == torch.float32 for tensor in tensors) else half


def _refused(*_: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast on CUDA; "
        "use binary_cross_entropy_with_logits"
    )


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
