"""Cross-entropy with stablemax (Prieto et al. 2025) in place of softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.nn import IGNORED
from lib.plan.types import WITHOUT_DOUBLE


def stablemax_cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """-log(s(x_target) / sum of s(x)) with s(x) = x + 1 for x >= 0 and 1 / (1 - x) below: (N,).

    0 where the target is IGNORED. Calculated in double precision where the device has it: as s grows
    only linearly, differences of probabilities are small.
    """
    exact = torch.float32 if logits_NV.device.type in WITHOUT_DOUBLE else torch.float64
    x_NV = logits_NV.to(exact)
    # Clamped, because the branch not taken would divide by zero and make the gradient NaN.
    share_NV = torch.where(x_NV < 0, 1 / (1 - x_NV.clamp(max=0)), x_NV + 1)
    counts_N = targets_N != IGNORED
    chosen_N = share_NV.gather(1, targets_N.clamp(min=0)[:, None])[:, 0]
    loss_N = (share_NV.sum(dim=1) / chosen_N).log()
    return torch.where(counts_N, loss_N, 0)
