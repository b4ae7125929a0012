"""ResNet-50: bottleneck blocks in four stages of (3, 4, 6, 3)."""

from __future__ import annotations

from torch import nn

from lib.data.types import ImageSpec
from models.resnet import Bottleneck, Options, ResNet

__all__ = ["TASK", "Options", "build"]

TASK = "classify"


def build(options: Options, spec: ImageSpec) -> nn.Module:
    """Build a network from (N, C, H, W) images of any size to (N, classes) logits."""
    return ResNet(Bottleneck, (3, 4, 6, 3), options=options, spec=spec)
