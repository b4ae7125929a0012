"""The network of "94% on CIFAR-10 in 3.29 seconds on a single GPU" (Jordan 2024, arXiv:2404.00498).

Changed: filters keep their norm instead of decaying, batch normalisation has a scale, and the outputs are
scaled by a learned head alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import ImageSpec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain

TASK = "classify"
PATCH = 2  # height and width of what is whitened, in pixels
SMALLEST_SIDE = 9  # pixels that leave one after three halvings
SMALLEST_VARIANCE = 5e-4  # added to that of a direction, of normalised pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/airbench/Kconfig."""

    width: int
    mirror: bool


def build(options: Options, spec: ImageSpec) -> nn.Module:
    """Build a network from (N, C, H, W) images to (N, classes) logits. Raises ConfigError for tiny images."""
    if min(spec.height, spec.width) < SMALLEST_SIDE:
        size = f"{spec.height}x{spec.width}"
        raise ConfigError(
            f"images of {spec.name} are {size}, and Airbench needs {SMALLEST_SIDE} pixels a side"
        )
    return Airbench(options, spec)


def initialise_from_samples(_: nn.Module, first_samples: Tensor) -> Mapping[str, Tensor]:
    """Return the filters that whiten the patches of normalised images (N, C, H, W), by name.

    They are the principal directions over the deviation along them, and the same with the other sign.
    """
    channels = first_samples.shape[1]
    patches_NFL = F.unfold(first_samples.double(), PATCH)
    patches_PF = patches_NFL.transpose(1, 2).flatten(0, 1)
    variances_F, directions_FF = torch.linalg.eigh(patches_PF.T @ patches_PF / len(patches_PF))
    filters_FF = (directions_FF / (variances_F + SMALLEST_VARIANCE).sqrt()).T.flip(0)
    filters = filters_FF.reshape(-1, channels, PATCH, PATCH)
    return {"whitening.filters": torch.cat([filters, -filters]).to(first_samples.dtype)}


class Airbench(nn.Module):
    """Whitening of patches, three blocks, the maximum over all places, and a linear classifier."""

    def __init__(self, options: Options, spec: ImageSpec) -> None:
        super().__init__()
        width, self.mirror = options.width, options.mirror
        self.whitening = Whitening(spec.channels)
        channels = (len(self.whitening.bias), width, 4 * width, 4 * width)
        self.blocks = nn.ModuleList(map(Block, channels, channels[1:]))
        self.head = nn.Linear(channels[-1], spec.classes, bias=False)
        self.chain = Chain()
        self.constrain_weights()

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the filters."""
        return [parameter for parameter in self.blocks.parameters() if parameter.dim() > 1]

    @torch.no_grad()
    def constrain_weights(self) -> None:
        """Scale the filters of each convolution to a mean square norm of 1: only directions are learned."""
        for filters in self.hidden_matrices():
            filters.mul_(len(filters) ** 0.5 / filters.norm())

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) images -> (N, classes) logits."""
        if self.training or not self.mirror:
            return self._classify(x_NCHW)
        return (self._classify(x_NCHW) + self._classify(x_NCHW.flip(3))) / 2

    def _classify(self, x_NCHW: Tensor) -> Tensor:
        y_NCHW = self.chain(x_NCHW, self.whitening, *self.blocks)
        return self.head(F.max_pool2d(y_NCHW, y_NCHW.shape[2:]).flatten(1))  # type: ignore[no-any-return]


class Whitening(nn.Module):
    """Convolution with fixed filters over patches, a learned bias, GELU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        features = channels * PATCH**2
        # Not a parameter, for it is never trained. Random until `initialise_from_samples` has seen images.
        self.register_buffer("filters", torch.randn(2 * features, channels, PATCH, PATCH) / features**0.5)
        self.bias = nn.Parameter(torch.zeros(2 * features))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, 2 C PATCH**2, H - 1, W - 1)."""
        return F.gelu(F.conv2d(x_NCHW, self.filters, self.bias))  # type: ignore[arg-type]


class Block(nn.Module):
    """Two 3x3 convolutions with normalisation and GELU, and a halving of the side after the first."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels_in, channels)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, channels_in, H, W) -> (N, channels, H // 2, W // 2)."""
        y_NCHW = F.gelu(self.norm1(F.max_pool2d(self.conv1(x_NCHW), 2)))
        return F.gelu(self.norm2(self.conv2(y_NCHW)))


def _convolution(channels_in: int, channels: int) -> nn.Conv2d:
    """Return a 3x3 convolution whose first filters pass one channel each."""
    convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight.data[:channels_in])
    return convolution
