"""Numerical precision of intermediate results."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def full_precision(x: Tensor) -> Tensor:
    """Convert half precision, which autocast produces, to float32; other types stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def without_autocast(like: Tensor) -> contextlib.AbstractContextManager[object]:
    """Disable autocast on the device of `like`; the meta device has none."""
    return contextlib.nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type of matrix products of `x` under autocast; None outside it."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)
