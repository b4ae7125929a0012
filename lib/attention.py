"""Causal attention by the fastest exact kernel that torch has for a device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.memory.simulation import kernels_for, simulated

_HALF = (torch.bfloat16, torch.float16)


def causal_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """softmax(q k' / sqrt(D)) v up to each one's own position: (B, H, T, D), typed as `q_BHTD`."""
    kernels = kernels_for(q_BHTD)
    if simulated() and kernels == "cuda":
        return _simulated_on_cuda(q_BHTD, k_BHTD, v_BHTD)
    if kernels != "cpu" or q_BHTD.dtype not in _HALF:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    # On a CPU torch's kernel is several times slower backwards in half precision than in single.
    with torch.autocast("cpu", enabled=False):
        mixed_BHTD = F.scaled_dot_product_attention(
            q_BHTD.float(), k_BHTD.float(), v_BHTD.float(), is_causal=True
        )
    return mixed_BHTD.to(q_BHTD.dtype)


def _simulated_on_cuda(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """What torch chooses on CUDA. Left to itself it chooses by the device, which is the CPU here."""
    if q_BHTD.dtype in _HALF:
        chosen = torch.ops.aten._scaled_dot_product_flash_attention
        return chosen(q_BHTD, k_BHTD, v_BHTD, is_causal=True)[0]  # type: ignore[no-any-return]
    chosen = torch.ops.aten._scaled_dot_product_efficient_attention
    return chosen(q_BHTD, k_BHTD, v_BHTD, None, True, is_causal=True)[0]  # type: ignore[no-any-return]
