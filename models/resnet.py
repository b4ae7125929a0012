"""Residual networks (He et al. 2015, arXiv:1512.03385) for images of any size.

Bottleneck blocks have their stride in the 3x3 convolution (version 1.5, Goyal et al. 2017, arXiv:1706.02677,
section 5.1). The last normalisation of a block starts at one, not zero, because Adam needs many steps to move
weights away from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import ImageSpec
from lib.nn.activation_checkpointing import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """stem: "cifar" for images of about 32x32, "imagenet" for about 224x224.

    width: channels of the first stage; the later ones have 2, 4 and 8 times as many.
    """

    stem: str
    width: int


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, added to their input."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels_in, channels, kernel=3, stride=stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels, kernel=3)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(channels_in, channels, stride=stride)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, channels_in, H, W) -> (N, channels, H / stride, W / stride)."""
        y_NCHW = F.relu(self.norm1(self.conv1(x_NCHW)), inplace=True)
        y_NCHW = self.norm2(self.conv2(y_NCHW))
        return F.relu(y_NCHW + self.shortcut(x_NCHW), inplace=True)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones on four times as many channels, added to its input."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels_in, channels, kernel=1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels, kernel=3, stride=stride)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = _convolution(channels, channels * self.expansion, kernel=1)
        self.norm3 = nn.BatchNorm2d(channels * self.expansion)
        self.shortcut = _shortcut(channels_in, channels * self.expansion, stride=stride)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, channels_in, H, W) -> (N, 4 * channels, H / stride, W / stride)."""
        y_NCHW = F.relu(self.norm1(self.conv1(x_NCHW)), inplace=True)
        y_NCHW = F.relu(self.norm2(self.conv2(y_NCHW)), inplace=True)
        y_NCHW = self.norm3(self.conv3(y_NCHW))
        return F.relu(y_NCHW + self.shortcut(x_NCHW), inplace=True)


class ResNet(nn.Module):
    """Stem, four stages of blocks, mean over all places, linear classifier.

    depths: blocks in each stage. Raises ValueError for a stem that does not exist.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        options: Options,
        spec: ImageSpec,
    ) -> None:
        super().__init__()
        self.stem = _stem(options.stem, spec.channels, options.width)
        stages, channels_in = [], options.width
        for stage, depth in enumerate(depths):
            channels = options.width * 2**stage
            blocks = []
            for position in range(depth):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(block(channels_in, channels, stride=stride))
                channels_in = channels * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels_in, spec.classes)
        self.chain = Chain()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) images -> (N, classes) logits."""
        blocks = [block for stage in self.stages.children() for block in stage.children()]
        return self.classifier(self.chain(x_NCHW, self.stem, *blocks).mean(dim=(2, 3)))  # type: ignore[no-any-return]


def _convolution(channels_in: int, channels_out: int, *, kernel: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


def _shortcut(channels_in: int, channels_out: int, *, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(
        _convolution(channels_in, channels_out, kernel=1, stride=stride), nn.BatchNorm2d(channels_out)
    )


def _stem(name: str, channels_in: int, width: int) -> nn.Sequential:
    if name == "cifar":
        layers = [_convolution(channels_in, width, kernel=3)]
    elif name == "imagenet":
        layers = [_convolution(channels_in, width, kernel=7, stride=2)]
    else:
        raise ValueError(f"no stem is named {name!r}: there are cifar and imagenet")
    stem = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    if name == "imagenet":
        stem.append(nn.MaxPool2d(3, stride=2, padding=1))
    return stem
