"""The original, bidirectional ResNet-BK block, which can only classify, or demonstrate a leak.

The diagonal comes from two continued fractions, which do not overflow, in place of the original's quotients
of determinants, and the gradient is exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.nn.dropout import Dropout
from lib.nn.precision import full_precision
from models.resnet_bk.scan import both_sides

EXPERTS = 4
MAX_POTENTIAL = 3.0


class UpstreamBlock(nn.Module):
    """x + f + scale W (Re G, Im G), where f = experts(norm(x)) and G is the diagonal of (H - i)^-1.

    H = tridiag(1, -2 + v, 1) with one number v for each position, from f. The diagonal is below 1 in
    absolute value, so that the original's limits on it never act.
    """

    def __init__(self, *, width: int, ratio: int, dropout: float, layer: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = Experts(width=width, ratio=ratio, dropout=dropout, site=layer + 1)
        self.potential = nn.Linear(width, 1)
        self.out = nn.Linear(2, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x_BTC: Tensor) -> Tensor:
        f_BTC = self.experts(self.norm(x_BTC))
        v_BT = self.potential(f_BTC)[..., 0].clamp(-MAX_POTENTIAL, MAX_POTENTIAL)
        v_TB = full_precision(v_BT).t()
        g_TB = both_sides(torch.complex(v_TB - 2.0, -torch.ones_like(v_TB)))
        return x_BTC + f_BTC + self.scale * self.out(torch.view_as_real(g_TB).transpose(0, 1))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Mixture of four two-layer networks with top-1 routing.

    As in the original, the router is not trained: its softmax over the single chosen score is always 1.
    """

    def __init__(self, *, width: int, ratio: int, dropout: float, site: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS).requires_grad_(False)
        self.into = nn.ModuleList(nn.Linear(width, ratio * width) for _ in range(EXPERTS))
        self.out = nn.ModuleList(nn.Linear(ratio * width, width) for _ in range(EXPERTS))
        self.dropout = Dropout(dropout, site=site)

    def forward(self, x_BTC: Tensor) -> Tensor:
        chosen_BT = self.router(x_BTC).argmax(-1)
        # All networks are computed, so that no shape depends on the data.
        outputs = []
        for into, out in zip(self.into, self.out, strict=True):
            outputs.append(out(self.dropout(F.relu(into(x_BTC)))))
        index_BTC1 = chosen_BT[..., None, None].expand(*x_BTC.shape, 1)
        return torch.stack(outputs, -1).gather(-1, index_BTC1)[..., 0]

    def idle_parameters(self) -> int:
        """Return the number of parameters of the networks that a token does not use."""
        own = sum(parameter.numel() for parameter in (*self.into[0].parameters(), *self.out[0].parameters()))
        return (EXPERTS - 1) * own
