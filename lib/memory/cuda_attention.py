"""Attention as torch runs it on CUDA (ATen/native/transformers/cuda), on simulated tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ATTENTION = F.scaled_dot_product_attention
_FLASH_WIDTH = 256  # largest head of the flash kernels
_FLASH_ROWS = 128  # to a multiple of which they round the number of queries


def attention_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (B, H, T, D): flash in half precision without a mask, else memory-efficient.

    Heads that share keys and values are read as they are by flash. Elsewhere torch repeats them and keeps all
    T x T weights (before pytorch/pytorch#191085, which gives the memory-efficient kernel the same).
    """
    if query.dim() != 4:
        return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    half = query.dtype in (torch.bfloat16, torch.float16)
    flash_width = query.shape[-1] == value.shape[-1] <= _FLASH_WIDTH
    if attn_mask is None and half and flash_width:
        return _Flash.apply(query, key, value, options)  # type: ignore[no-any-return, no-untyped-call]
    if enable_gqa and query.shape[1] != key.shape[1]:
        kept = torch.ops.aten._scaled_dot_product_attention_math
        return kept(query, key, value, attn_mask, enable_gqa=True, **options)[0]  # type: ignore[no-any-return]
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        attn_mask = attn_mask.to(query.dtype).expand(shape)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, **options)[0]  # type: ignore[no-any-return]


class _Flash(torch.autograd.Function):
    """The flash kernels, with what mha_bwd of flash_attn/flash_api.cpp allocates beside the gradients."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        out: Tensor
        out, *rest = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **options)
        sums, *lengths, seed, offset, _ = rest  # of the exponentials; of packed sequences, and the longest
        ctx.save_for_backward(query, key, value, out, sums, seed, offset)
        ctx.lengths, ctx.options = lengths, options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, seed, offset = ctx.saved_tensors
        batch, heads, length, width = query.shape
        rows = -(-length // _FLASH_ROWS) * _FLASH_ROWS
        step = 32 if width <= 128 else 64
        single = {"dtype": torch.float32, "device": query.device}
        scratch = [
            torch.empty(batch, heads, rows, **single),
            torch.empty(batch, rows, heads, -(-width // step) * step, **single),
        ]
        if key.shape[1] != heads:  # a gradient for each head, summed over those that share
            scratch += [key.new_empty(batch, key.shape[2], heads, width) for _ in range(2)]
        options = dict(ctx.options)
        fixed = options.pop("dropout_p"), options.pop("is_causal")
        saved = query, key, value, out, sums, *ctx.lengths, *fixed, seed, offset
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(grad, *saved, **options)
        del scratch
        return *gradients, None
