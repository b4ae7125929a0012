"""ResNet-18: basic blocks in four stages of (2, 2, 2, 2)."""

from __future__ import annotations

from torch import nn

from lib.data.types import ImageSpec
from models.resnet import BasicBlock, Options, ResNet

__all__ = ["TASK", "Options", "build"]

TASK = "classify"


def build(options: Options, spec: ImageSpec) -> nn.Module:
    """Build a network from (N, C, H, W) images of any size to (N, classes) logits."""
    return ResNet(BasicBlock, (2, 2, 2, 2), options=options, spec=spec)
