"""LatentWire: encodes a text into a few vectors that two frozen language models read as embedded tokens.

This is the trained part: a byte encoder, a pooler into M latents, and an adapter from latents to the channels
of each language model. The frozen language models belong to the task.

Shapes: B sources, T bytes, D channels, H heads, K channels of a head, M latents, C channels of a language
model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain
from lib.nn.attention import merge_heads, split_heads

TASK = "bridge"

MAX_WAVELENGTH = 1e4  # of the sinusoidal positions (Vaswani et al. 2017)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/latentwire/Kconfig."""

    latents: int
    width: int
    layers: int
    heads: int


class Prefixes(NamedTuple):
    """Latents in the channels of each language model, with values of about 1."""

    a_BMC: Tensor
    b_BMC: Tensor


def build(options: Options, spec: AnswerSpec) -> nn.Module:
    """Build a network from int64 (B, T) bytes to `Prefixes`.

    Raises ConfigError if the width is odd or not a multiple of the number of heads.
    """
    if options.width % options.heads or options.width % 2:
        raise ConfigError(
            f"CONFIG_LATENTWIRE_WIDTH={options.width} cannot be cut into {options.heads} heads and pairs",
            todo="make it an even multiple of CONFIG_LATENTWIRE_HEADS",
        )
    return LatentWire(options, spec)


class LatentWire(nn.Module):
    """Byte encoder, pooler and two adapters."""

    def __init__(self, options: Options, spec: AnswerSpec) -> None:
        super().__init__()
        width = options.width
        self.byte = nn.Embedding(spec.vocab_size, width)
        self.positions_TD: Tensor
        # Not in checkpoints, because they follow from the sizes.
        self.register_buffer("positions_TD", _sinusoids(spec.source_bytes, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads=options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(width)
        self.pooler = Pooler(width, heads=options.heads, latents=options.latents)
        first, second = spec.sides
        self.adapter_a = Adapter(width, first.width, latents=options.latents)
        self.adapter_b = Adapter(width, second.width, latents=options.latents)
        self.chain = Chain()

    def forward(self, bytes_BT: Tensor) -> Prefixes:
        """(B, T) bytes, zero-padded, -> prefixes (B, M, C). Padding is not masked."""
        x_BTD = self.byte(bytes_BT) + self.positions_TD
        z_BMD = self.pooler(self.norm(self.chain(x_BTD, *self.blocks)))
        return Prefixes(self.adapter_a(z_BMD), self.adapter_b(z_BMD))


class Block(nn.Module):
    """Bidirectional attention, then a two-layer network, each on normalised input."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.qkv(self.norm1(x_BTD)).chunk(3, dim=2)
        x_BTD = x_BTD + self.attention_out(_attention(q_BTD, k_BTD, v_BTD, heads=self.heads))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x_BTD))))  # type: ignore[no-any-return]


class Pooler(nn.Module):
    """Cross-attention of M learned queries over all bytes, with gated residuals."""

    def __init__(self, width: int, *, heads: int, latents: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_MD = nn.Parameter(torch.randn(latents, width) / math.sqrt(width))
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) -> (B, M, D)."""
        q_BMD = self.query(self.queries_MD).expand(len(x_BTD), -1, -1)
        k_BTD, v_BTD = self.key_value(x_BTD).chunk(2, dim=2)
        found_BMD = self.out(_attention(q_BMD, k_BTD, v_BTD, heads=self.heads))
        z_BMD = self.queries_MD + torch.sigmoid(self.gate(found_BMD)) * found_BMD
        return z_BMD + self.mlp_out(F.gelu(self.mlp_in(self.norm(z_BMD))))  # type: ignore[no-any-return]


class Adapter(nn.Module):
    """Map latents to the channels of a language model: a residual network with FiLM modulation by z."""

    def __init__(self, width: int, channels: int, *, latents: int) -> None:
        super().__init__()
        self.position_MD = nn.Parameter(torch.zeros(latents, width))
        self.norm_in = nn.LayerNorm(width)
        self.expand, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.out, self.past = nn.Linear(width, channels), nn.Linear(width, channels)
        self.film = nn.Linear(width, 2 * channels)  # Perez et al. 2018
        self.norm_out = nn.LayerNorm(channels)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, z_BMD: Tensor) -> Tensor:
        """(B, M, D) -> (B, M, C)."""
        z_BMD = z_BMD + self.position_MD
        hidden_BMD = F.gelu(self.shrink(F.gelu(self.expand(self.norm_in(z_BMD)))))
        x_BMC = self.out(hidden_BMD) + self.past(z_BMD)
        factor_BMC, shift_BMC = self.film(z_BMD).chunk(2, dim=2)
        x_BMC = x_BMC * torch.sigmoid(factor_BMC) + shift_BMC
        return self.scale * self.norm_out(x_BMC)  # type: ignore[no-any-return]


def _attention(q_BMD: Tensor, k_BTD: Tensor, v_BTD: Tensor, *, heads: int) -> Tensor:
    q_BHMK, k_BHTK, v_BHTK = (split_heads(part, heads) for part in (q_BMD, k_BTD, v_BTD))
    return merge_heads(F.scaled_dot_product_attention(q_BHMK, k_BHTK, v_BHTK))


def _sinusoids(count: int, width: int) -> Tensor:
    """Return sinusoidal positions (count, width)."""
    rates_K = MAX_WAVELENGTH ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles_TK = torch.arange(count, dtype=torch.float64)[:, None] * rates_K
    return torch.cat((angles_TK.sin(), angles_TK.cos()), dim=1).float()
