"""Frozen linear layers in the 4 bits of NF4 with double quantisation (Dettmers et al. 2023).

bitsandbytes converts. In a simulation nothing is converted, and only sizes count.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.memory.simulation import simulated
from lib.nn.packages import import_extra
from lib.nn.precision import autocast_dtype

EXTRA = "bitsandbytes"  # the package that it needs
_BLOCK, _GROUP = 64, 256  # weights that share a scale, and scales that share one of theirs


class FourBitLinear(nn.Linear):
    """Mix-in of a linear layer whose weight `pack` replaces by n / 2 bytes and its scales."""

    packed_from: torch.dtype | None = None  # the type of the weight that was packed
    scales: Tensor  # uint8, of blocks
    groups: Tensor  # float32, of groups of scales
    offset: Tensor  # float32, what was subtracted from the scales
    codes: Tensor  # float32, what 4 bits stand for
    scale_codes: Tensor  # float32, what a byte of `scales` stands for

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        if self.packed_from is None:
            return super().forward(x)
        dtype = autocast_dtype(x) or x.dtype
        y: Tensor = _Product.apply(x.to(dtype), self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """x W', where W is made from its 4 bits in the forward and again in the backward pass, and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, _dense(layer, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ _dense(ctx.layer, gradients[0].dtype), None


def pack(model: nn.Module, device: torch.device) -> None:
    """Store the weights of all FourBitLinear of `model` in 4 bits on `device`, one layer after the other.

    Raises ConfigError without bitsandbytes.
    """
    for layer in (each for each in model.modules() if isinstance(each, FourBitLinear)):
        weight = layer.weight.detach()
        del layer.weight
        for name, tensor in _packed(weight, device).items():
            layer.register_buffer(name, tensor, persistent=False)
        vars(layer)["packed_from"] = weight.dtype


def _packed(weight: Tensor, device: torch.device) -> dict[str, Tensor]:
    if simulated() or weight.is_meta:
        blocks = math.ceil(weight.numel() / _BLOCK)
        sizes = {"weight": math.ceil(weight.numel() / 2), "scales": blocks}
        sizes |= {"groups": math.ceil(blocks / _GROUP), "offset": 1, "codes": 16, "scale_codes": 256}
        kinds = {"weight": torch.uint8, "scales": torch.uint8}
        return {n: weight.new_empty(size, dtype=kinds.get(n, torch.float32)) for n, size in sizes.items()}
    # In one row: of rows that are no multiple of a block its kernel for CPUs makes other numbers (0.50.2).
    flat = weight.to(device).reshape(1, -1)
    options: dict[str, Any] = {"blocksize": _BLOCK, "compress_statistics": True, "quant_type": "nf4"}
    packed, state = import_extra(EXTRA).functional.quantize_4bit(flat, **options)
    return {
        "weight": packed, "scales": state.absmax, "groups": state.state2.absmax, "offset": state.offset,
        "codes": state.code, "scale_codes": state.state2.code,
    }  # fmt: skip


def _dense(layer: FourBitLinear, dtype: torch.dtype) -> Tensor:
    """Return the weight (outputs, inputs)."""
    shape = layer.out_features, layer.in_features
    if simulated() or layer.weight.is_meta:
        return layer.weight.new_empty(shape, dtype=dtype)
    functional = import_extra(EXTRA).functional
    # In another type than theirs where a whole model was converted: its own are float32.
    own = {name: getattr(layer, name).float() for name in ("groups", "offset", "codes", "scale_codes")}
    made = dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32
    of_scales = functional.QuantState(
        absmax=own["groups"], code=own["scale_codes"], blocksize=_GROUP, dtype=torch.float32
    )
    state = functional.QuantState(
        absmax=layer.scales, shape=torch.Size([1, math.prod(shape)]), code=own["codes"], blocksize=_BLOCK,
        quant_type="nf4", dtype=made, offset=own["offset"], state2=of_scales,
    )  # fmt: skip
    dense: Tensor = functional.dequantize_4bit(layer.weight, state)
    return dense.view(shape).to(dtype)


def dense_weight(layer: nn.Linear) -> tuple[Tensor, torch.dtype]:
    """Return the weight of `layer` in float32 or more, and the type that it is to be stored in."""
    if isinstance(layer, FourBitLinear) and layer.packed_from is not None:
        return _dense(layer, torch.float32), layer.packed_from
    return layer.weight.to(torch.promote_types(layer.weight.dtype, torch.float32)), layer.weight.dtype
