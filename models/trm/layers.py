"""Layers of the Tiny Recursive Model: post-norm blocks without weights in their normalisation.

Shapes: B samples, T tokens, D channels, H heads, K channels of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.nn.attention import full_attention

EPSILON = 1e-5
ROTARY_BASE = 1e4
# Standard deviation of a standard normal cut at +-2.
_CUT_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


class Block(nn.Module):
    """Mix the tokens, then the channels; after each, normalise what was added up."""

    def __init__(
        self, *, mixer: str, width: int, tokens: int, heads: int, expansion: float, multiple: int
    ) -> None:
        super().__init__()
        self.over_tokens = mixer == "mlp"
        self.mixer: nn.Module
        if self.over_tokens:
            self.mixer = GatedNetwork(tokens, expansion=expansion, multiple=multiple)
        else:
            self.mixer = Attention(width, heads=heads, tokens=tokens)
        self.network = GatedNetwork(width, expansion=expansion, multiple=multiple)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.over_tokens:
            # Normalised over the tokens of each channel, as it is transposed: so has the original.
            x_BDT = x_BTD.transpose(1, 2)
            x_BTD = rms_norm(x_BDT + self.mixer(x_BDT)).transpose(1, 2)
        else:
            x_BTD = rms_norm(x_BTD + self.mixer(x_BTD))
        return rms_norm(x_BTD + self.network(x_BTD))


class GatedNetwork(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, *, expansion: float, multiple: int) -> None:
        super().__init__()
        inner = -(-round(expansion * width * 2 / 3) // multiple) * multiple
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Every token to every token, with rotary positions (Su et al. 2021)."""

    def __init__(self, width: int, *, heads: int, tokens: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = torch.arange(0, width // heads, 2, dtype=torch.float64) / (width // heads)
        angles_TK = torch.arange(tokens, dtype=torch.float64)[:, None] * (ROTARY_BASE**-half)[None].repeat(
            1, 2
        )
        self.cosines_TK: Tensor
        self.sines_TK: Tensor
        # Not in a checkpoint: they follow from the sizes.
        self.register_buffer("cosines_TK", angles_TK.cos().float(), persistent=False)
        self.register_buffer("sines_TK", angles_TK.sin().float(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            part_BTD.view(batch, length, self.heads, -1).transpose(1, 2)
            for part_BTD in self.qkv(x_BTD).split(width, dim=2)
        )
        mixed_BHTK = full_attention(self._turned(q_BHTK), self._turned(k_BHTK), v_BHTK)
        return self.out(mixed_BHTK.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def _turned(self, x_BHTK: Tensor) -> Tensor:
        first, second = x_BHTK.chunk(2, dim=-1)
        turned = x_BHTK * self.cosines_TK + torch.cat((-second, first), dim=-1) * self.sines_TK
        return turned.to(x_BHTK.dtype)


def rms_norm(x: Tensor) -> Tensor:
    """x over the root of its mean square along the last dimension, found in single precision at least."""
    exact = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + EPSILON)).to(x.dtype)


@torch.no_grad()
def truncated_normal_(tensor: Tensor, *, std: float) -> Tensor:
    """Fill with a normal distribution cut at two of its deviations, whose own deviation is then `std`.

    By the inverse of its distribution function: torch's own draws again until all numbers are inside.
    """
    wide, share = std / _CUT_STD, math.erf(math.sqrt(2))
    tensor.uniform_(-share, share).erfinv_().mul_(math.sqrt(2) * wide)
    return tensor.clamp_(-2 * wide, 2 * wide)


def initialise(model: nn.Module) -> None:
    """Truncated normal weights with the deviation of LeCun et al. 1998, 1 / sqrt(inputs); biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            truncated_normal_(module.weight, std=1 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
