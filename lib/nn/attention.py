"""Attention by torch's fastest exact kernel for a device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.memory.simulation import kernels_for

_HALF = (torch.bfloat16, torch.float16)


def causal_attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, seen_BTT: Tensor | None = None
) -> Tensor:
    """Causal softmax(q k' / sqrt(D)) v: (B, H, T, D), in the dtype of `q_BHTD`.

    seen_BTT: the tokens that each token sees, itself among them, if not all before it (`same_document`).
    """
    if seen_BTT is None:
        return _attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
    return _attention(q_BHTD, k_BHTD, v_BHTD, is_causal=False, mask=seen_BTT[:, None])


def same_document(documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return which tokens each token sees, bool (B, T, T): those of its own document up to itself.

    Also its position in the document, int64 (B, T). Tokens of a document are consecutive.
    """
    seen_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]).tril()
    return seen_BTT, seen_BTT.sum(dim=2) - 1


def full_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Bidirectional softmax(q k' / sqrt(D)) v: (B, H, T, D), in the dtype of `q_BHTD`."""
    return _attention(q_BHTD, k_BHTD, v_BHTD, is_causal=False)


def _attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, *, is_causal: bool, mask: Tensor | None = None
) -> Tensor:
    if kernels_for(q_BHTD) != "cpu" or q_BHTD.dtype not in _HALF:
        return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, mask, is_causal=is_causal)
    # Torch's CPU kernel is several times slower in half precision than in single in the backward pass.
    with torch.autocast("cpu", enabled=False):
        mixed_BHTD = F.scaled_dot_product_attention(
            q_BHTD.float(), k_BHTD.float(), v_BHTD.float(), mask, is_causal=is_causal
        )
    return mixed_BHTD.to(q_BHTD.dtype)


def split_heads(x_BTC: Tensor, heads: int) -> Tensor:
    """Split the channels into heads: (B, T, C) -> (B, H, T, D)."""
    batch, length, _ = x_BTC.shape
    return x_BTC.view(batch, length, heads, -1).transpose(1, 2)


def merge_heads(x_BHTD: Tensor) -> Tensor:
    """Invert `split_heads`: (B, H, T, D) -> (B, T, C)."""
    return x_BHTD.transpose(1, 2).flatten(2)
