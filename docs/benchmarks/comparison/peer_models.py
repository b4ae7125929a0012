"""The three networks as users of other programs write them: torch's layers in their default layout.

Each has the parameters of the toolkit's model of that name in the same order, and computes the same function.
Shapes: N images, B texts, T tokens, C channels, H heads, V vocabulary size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data import ImageSpec, TextSpec
from lib.data.types import Spec
from lib.errors import ConfigError


def lenet5(spec: ImageSpec) -> nn.Module:
    """Return LeNet-5 as in tutorials: ReLU before each pooling."""
    return nn.Sequential(
        nn.Conv2d(spec.channels, 6, 5, padding=(32 - spec.height) // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, spec.classes),
    )


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            one_by_one = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(one_by_one, nn.BatchNorm2d(channels))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Two convolutions, added to their input."""
        y_NCHW = F.relu(self.bn1(self.conv1(x_NCHW)))
        return F.relu(self.bn2(self.conv2(y_NCHW)) + self.shortcut(x_NCHW))


def resnet18(spec: ImageSpec) -> nn.Module:
    """Return ResNet-18 with the stem for small images."""
    layers = [nn.Conv2d(spec.channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels_in = 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        layers += [_Block(channels_in, channels, 2 if stage else 1), _Block(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, spec.classes))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, gelu: str) -> None:
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Add attention and a network of two layers, each of the normalised input."""
        B, T, C = x_BTC.shape
        parts = self.qkv(self.norm1(x_BTC)).split(C, dim=2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.projection(seen.transpose(1, 2).contiguous().view(B, T, C))
        hidden_BTF = F.gelu(self.up(self.norm2(x_BTC)), approximate=self.gelu)
        return x_BTC + self.down(hidden_BTF)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """GPT-2 without biases, with a tied head and initial weights as in nanoGPT.

    4 layers of 128 channels and 4 heads: nanoGPT's example for a CPU, and defconfig gpt2-shakespeare.
    gelu: "tanh" as in GPT-2, "none" for the exact function, which nanoGPT has.
    """

    def __init__(
        self, spec: TextSpec, *, gelu: str, layers: int = 4, width: int = 128, heads: int = 4
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(spec.vocab_size, width), nn.Embedding(spec.block_size, width)
        self.blocks = nn.Sequential(*(_Layer(width, heads, gelu) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = (2 * layers) ** -0.5 if name.endswith(("projection.weight", "down.weight")) else 1
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """int64 (B, T) -> (B, T, V) logits."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.token(tokens_BT) + self.position(places_T)
        return F.linear(self.norm(self.blocks(x_BTC)), self.token.weight)


def peer_model(name: str, spec: Spec) -> nn.Module:
    """Return the network beside the model `name`. Raises ConfigError where there is none."""
    if name == "gpt2" and isinstance(spec, TextSpec):
        return GPT(spec, gelu="tanh")
    networks = {"lenet5": lenet5, "resnet18": resnet18}
    if name not in networks or not isinstance(spec, ImageSpec):
        raise ConfigError(f"{name} on {spec.name} was written with the toolkit alone")
    return networks[name](spec)
