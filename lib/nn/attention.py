"""Attention by the fastest exact kernel that torch has for a device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.memory.simulation import kernels_for

_HALF = (torch.bfloat16, torch.float16)


def causal_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """softmax(q k' / sqrt(D)) v up to each one's own position: (B, H, T, D), typed as `q_BHTD`."""
    return _attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)


def full_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """softmax(q k' / sqrt(D)) v over all positions: (B, H, T, D), typed as `q_BHTD`."""
    return _attention(q_BHTD, k_BHTD, v_BHTD, is_causal=False)


def _attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, is_causal: bool) -> Tensor:
    if kernels_for(q_BHTD) != "cpu" or q_BHTD.dtype not in _HALF:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=is_causal)
    # On a CPU torch's kernel is several times slower backwards in half precision than in single.
    with torch.autocast("cpu", enabled=False):
        mixed_BHTD = F.scaled_dot_product_attention(
            q_BHTD.float(), k_BHTD.float(), v_BHTD.float(), is_causal=is_causal
        )
    return mixed_BHTD.to(q_BHTD.dtype)
