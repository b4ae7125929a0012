"""The plain block: a transformer layer that is iterated and has no energy.

    f(h; x) = LN(x + a + MLP(LN(a)))          a = h + attention(LN(h))

Without the source x or the last normalisation the state would grow without bound.
Shapes: B samples, T tokens, D channels, H heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.looped.energy import Source, attention, merge_heads, split_heads


class PlainBlock(nn.Module):
    """Weights of the vector field f."""

    def __init__(self, *, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, hidden)
        self.mlp_out = nn.Linear(hidden, width)
        self.fast_step: PlainStep = PlainBlock.once  # or its compiled version

    def source(self, x_BTD: Tensor, allowed: Tensor | None) -> Source:
        """Return the source of input x."""
        return Source(x_BTD, None, allowed)

    def activate(self, h_BTD: Tensor) -> Tensor:
        """Return the state itself, which energy blocks pass through an activation."""
        return h_BTD

    def step(self, h_BTD: Tensor, source: Source) -> Tensor:
        """Apply one iteration, compiled where no gradient is taken."""
        return self.once(h_BTD, source) if torch.is_grad_enabled() else self.fast_step(self, h_BTD, source)

    def compile_step(self, compiler: Callable[[PlainStep], PlainStep]) -> None:
        """Compile the iteration for use without autograd."""
        self.fast_step = compiler(PlainBlock.once)

    def once(self, h_BTD: Tensor, source: Source) -> Tensor:
        """Return f(h; x)."""
        a_BTD = h_BTD + self._attend(self.norm1(h_BTD), source.allowed)
        hidden_BTF = F.gelu(self.mlp_in(self.norm2(a_BTD)))
        return self.norm3(source.x_BTD + a_BTD + self.mlp_out(hidden_BTF))  # type: ignore[no-any-return]

    def _attend(self, h_BTD: Tensor, allowed: Tensor | None) -> Tensor:
        q_BHTZ, k_BHTZ, v_BHTZ = (
            split_heads(part_BTD, self.heads) for part_BTD in self.qkv(h_BTD).split(h_BTD.shape[2], dim=2)
        )
        return self.attention_out(merge_heads(attention(q_BHTZ, k_BHTZ, allowed) @ v_BHTZ))  # type: ignore[no-any-return]


PlainStep = Callable[[PlainBlock, Tensor, Source], Tensor]
