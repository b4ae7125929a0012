"""Multilayer perceptron: linear layers with ReLU and dropout, for rows of a table."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from lib.data.types import TableClassSpec, TableLabelsSpec, TableSpec
from lib.nn.activation_checkpointing import Chain
from lib.nn.dropout import Dropout

TASK = "classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/mlp/Kconfig."""

    width: int
    depth: int
    dropout: float


def build(options: Options, spec: TableSpec | TableClassSpec | TableLabelsSpec) -> nn.Module:
    """Build a network from (N, F) rows to (N, classes) logits or (N, targets) numbers."""
    return Mlp(options, spec)


class Mlp(nn.Module):
    """`depth` hidden layers of `width` units, and a linear layer."""

    def __init__(self, options: Options, spec: TableSpec | TableClassSpec | TableLabelsSpec) -> None:
        super().__init__()
        widths = [*spec.input_shape, *(options.width for _ in range(options.depth))]
        outputs = len(spec.targets) if isinstance(spec, TableSpec) else spec.classes
        self.layers = nn.ModuleList(
            _Hidden(*pair, options.dropout, site=site) for site, pair in enumerate(pairwise(widths))
        )
        self.head = nn.Linear(options.width, outputs)
        self.chain = Chain()

    def forward(self, x_NF: Tensor) -> Tensor:
        """(N, F) rows -> (N, outputs)."""
        return self.head(self.chain(x_NF, *self.layers))  # type: ignore[no-any-return]


class _Hidden(nn.Module):
    def __init__(self, inputs: int, outputs: int, dropout: float, *, site: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(inputs, outputs), Dropout(dropout, site=site)

    def forward(self, x_NF: Tensor) -> Tensor:
        return self.dropout(F.relu(self.linear(x_NF)))  # type: ignore[no-any-return]
