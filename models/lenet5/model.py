"""LeNet-5 (LeCun et al. 1998) with ReLU, max pooling and dense connections in place of the original's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import ImageSpec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain
from lib.plugins import NoOptions as Options

TASK = "classify"


def build(options: Options, spec: ImageSpec) -> nn.Module:  # noqa: ARG001
    """Build a network from (N, C, 28, 28) or (N, C, 32, 32) images to (N, classes) logits.

    Raises ConfigError for other image sizes.
    """
    size = f"{spec.height}x{spec.width}"
    if size not in {"28x28", "32x32"}:
        raise ConfigError(
            f"LeNet-5 takes images of 28x28 or 32x32, and those of {spec.name} are {size}",
            todo="choose another data set (CONFIG_DATASET_*) or another model (CONFIG_MODEL_*)",
        )
    return LeNet5(spec)


class LeNet5(nn.Module):
    """Two convolutions and three linear layers. 28x28 images are padded to 32x32 with zeros."""

    def __init__(self, spec: ImageSpec) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(spec.channels, 6, 5, padding=(32 - spec.height) // 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.linear1 = nn.Linear(16 * 5 * 5, 120)
        self.linear2 = nn.Linear(120, 84)
        self.linear3 = nn.Linear(84, spec.classes)
        self.chain = Chain()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, C, H, W) images -> (N, classes) logits."""
        return self.chain(x_NCHW, self._first_maps, self._second_maps, self._classify)  # type: ignore[no-any-return]

    # Max pooling and ReLU commute; in this order ReLU has a quarter of the work.

    def _first_maps(self, x_NCHW: Tensor) -> Tensor:
        return F.relu(F.max_pool2d(self.conv1(x_NCHW), 2))

    def _second_maps(self, x_NCHW: Tensor) -> Tensor:
        return F.relu(F.max_pool2d(self.conv2(x_NCHW), 2))

    def _classify(self, x_NCHW: Tensor) -> Tensor:
        x_NF = F.relu(self.linear1(x_NCHW.flatten(1)))
        return self.linear3(F.relu(self.linear2(x_NF)))  # type: ignore[no-any-return]
