"""Attention written out, for states that may be complex and for Jacobians in both directions.

Shapes: B samples, T tokens, D channels, H heads, Z channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q_BHTZ: Tensor, k_BHTZ: Tensor, allowed: Tensor | None) -> Tensor:
    """Softmax of q . k / sqrt(Z) over the tokens that are allowed: (B, H, T, T).

    allowed: bool, broadcast to it; None: all. A token that may see none has a row of zeros. Of complex
    numbers it is the analytic continuation.
    """
    scores = q_BHTZ @ k_BHTZ.transpose(2, 3) * q_BHTZ.shape[-1] ** -0.5
    if scores.is_complex():
        return _complex_softmax(scores, allowed)
    if allowed is None:
        return scores.softmax(dim=3)  # type: ignore[no-any-return]
    return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(dim=3) * allowed  # type: ignore[no-any-return]


def split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, D) -> (B, H, T, Z)."""
    batch, length, width = x_BTD.shape
    return x_BTD.view(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(x_BHTZ: Tensor) -> Tensor:
    """(B, H, T, Z) -> (B, T, D)."""
    return x_BHTZ.transpose(1, 2).flatten(2)


def _complex_softmax(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool, device=scores.device)
    size = scores.real.masked_fill(~allowed, torch.finfo(scores.real.dtype).min)
    grown = torch.exp(scores - size.amax(dim=3, keepdim=True)) * allowed
    total = grown.sum(dim=3, keepdim=True)
    return grown / total.where(allowed.any(dim=-1, keepdim=True), torch.ones_like(total))
