"""Small vision transformer with a convolutional stem (Dosovitskiy et al. 2021; Xiao et al. 2021).

Shapes: N images, T tokens, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import ImageSpec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain
from lib.nn.attention import full_attention, merge_heads, split_heads

TASK = "classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/vit/Kconfig."""

    width: int
    layers: int
    heads: int
    halvings: int


def build(options: Options, spec: ImageSpec) -> nn.Module:
    """Build a network from images (N, C, H, W) to (N, classes) logits. Raises ConfigError for the heads."""
    if options.width % options.heads:
        what = f"CONFIG_VIT_WIDTH={options.width} is not a multiple of CONFIG_VIT_HEADS={options.heads}"
        raise ConfigError(what, why="every head has an equal share of the channels")
    return VisionTransformer(options, spec)


class VisionTransformer(nn.Module):
    """Convolutions, blocks of attention, and a linear head on the mean of the tokens."""

    def __init__(self, options: Options, spec: ImageSpec) -> None:
        super().__init__()
        widths = [spec.channels, 32, *[64] * (options.halvings - 1), options.width]
        strides = [2, 1, *[2] * (options.halvings - 1)]
        self.stem = nn.ModuleList(
            nn.Conv2d(given, made, 3, stride, padding=1)
            for given, made, stride in zip(widths, widths[1:], strides, strict=False)
        )
        tokens = -(-spec.height >> options.halvings) * -(-spec.width >> options.halvings)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, options.width))
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, spec.classes)
        self.chain = Chain()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, classes)."""
        first, *others = self.stem
        x = first(x)
        for convolution in others:
            x = convolution(F.gelu(x))
        x_NTC = self.chain(x.flatten(2).transpose(1, 2) + self.position, *self.blocks)
        return self.head(self.norm(x_NTC).mean(dim=1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a two-layer network, each on normalised input and added to what it was given."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        width, self.heads = options.width, options.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        for last in (self.attention_out, self.mlp_out):  # at first a block changes nothing
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x_NTC: Tensor) -> Tensor:
        q, k, v = (split_heads(each, self.heads) for each in self.qkv(self.norm1(x_NTC)).chunk(3, dim=-1))
        x_NTC = x_NTC + self.attention_out(merge_heads(full_attention(q, k, v)))
        return x_NTC + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x_NTC))))  # type: ignore[no-any-return]
