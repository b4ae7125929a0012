"""Cross-entropy by softmax, without a single-precision copy of all logits, and by stablemax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.memory.simulation import kernels_for, simulated
from lib.nn import IGNORED
from lib.plan.types import WITHOUT_DOUBLE

# Logits per chunk: what stays in a CPU's cache, and what fills a GPU.
CPU_ELEMENTS = 1 << 18
GPU_ELEMENTS = 1 << 24


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """-log softmax(logits)[target] in nats: float32 (N,) (float64 for such logits), 0 where IGNORED.

    Logits may be in half precision; the arithmetic is single. Besides the logits and, in backward,
    their gradient in their own type, memory is needed only for one chunk of rows.
    """
    if torch.compiler.is_compiling():
        # The compiler fuses it all: it keeps the logits as they are, and unrolls no loop over chunks.
        whole_NV = logits_NV.to(_exact(logits_NV))
        return F.cross_entropy(whole_NV, targets_N, reduction="none", ignore_index=IGNORED)
    return _CrossEntropy.apply(logits_NV, targets_N)  # type: ignore[no-any-return, no-untyped-call]


def stablemax_cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """-log(s(x_target) / sum of s(x)) with s(x) = x + 1 for x >= 0 and 1 / (1 - x) below: (N,).

    (Prieto et al. 2025.) 0 where the target is IGNORED. Calculated in double precision where the device has
    it: as s grows only linearly, differences of probabilities are small.
    """
    exact = torch.float32 if logits_NV.device.type in WITHOUT_DOUBLE else torch.float64
    x_NV = logits_NV.to(exact)
    # Clamped, because the branch not taken would divide by zero and make the gradient NaN.
    share_NV = torch.where(x_NV < 0, 1 / (1 - x_NV.clamp(max=0)), x_NV + 1)
    counts_N = targets_N != IGNORED
    chosen_N = share_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]
    loss_N = (share_NV.sum(dim=1) / chosen_N).log()
    return torch.where(counts_N, loss_N, 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        counted_N = targets_N != IGNORED
        column_N1 = targets_N.where(counted_N, 0)[:, None]
        normaliser_N = logits_NV.new_empty(len(logits_NV), dtype=_exact(logits_NV))
        for rows in _slices(logits_NV):
            normaliser_N[rows] = logits_NV[rows].to(_exact(logits_NV)).logsumexp(dim=1)
        picked_N = logits_NV.gather(1, column_N1)[:, 0]
        ctx.save_for_backward(logits_NV, column_N1, counted_N)
        return (normaliser_N - picked_N).where(counted_N, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None]:
        logits_NV, column_N1, counted_N = ctx.saved_tensors
        gradient_N1 = gradient_N.where(counted_N, 0.0)[:, None]
        minus_one_N1 = torch.full_like(gradient_N1, -1.0)
        result_NV = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
        for rows in _slices(logits_NV):
            part_RV = F.softmax(logits_NV[rows], 1, dtype=_exact(logits_NV))
            part_RV.scatter_add_(1, column_N1[rows], minus_one_N1[rows])
            result_NV[rows] = part_RV.mul_(gradient_N1[rows])
        return result_NV, None


def _exact(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _slices(logits_NV: Tensor) -> Iterator[slice]:
    rows, columns = logits_NV.shape
    step = max(1, (CPU_ELEMENTS if kernels_for(logits_NV) == "cpu" else GPU_ELEMENTS) // columns)
    starts = range(0, rows, step)
    if simulated():
        starts = starts[:2]  # all other chunks reuse the memory of the first ones
    return (slice(start, start + step) for start in starts)
