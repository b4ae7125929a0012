"""Numerical precision of intermediate results."""

from __future__ import annotations

import torch
from torch import Tensor


def full_precision(x: Tensor) -> Tensor:
    """Convert half precision, which autocast produces, to float32; other types stay."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
