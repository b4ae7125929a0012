"""Constants that keep their values in a simulation, and what is drawn by chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.memory import estimate
from tests.lib.memory.test_any_module import same


class Constants(nn.Module):
    """Its structure comes from values of constants, its branch from a buffer."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates))
        self.norm = nn.BatchNorm1d(4, momentum=None)  # torch reads its count
        self.register_buffer("ready", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.tensor([1, 3]).tolist()
        first, second = (self.norm(self.layers(x)) if self.ready else x).split(sizes, dim=1)
        return first * second


@pytest.mark.slow
def test_constants_may_be_read() -> None:
    assert same(estimate(Constants, (8, 4)), estimate(Constants(), (8, 4)))


class LayerDrop(nn.Module):
    """Skips its layer by chance, as the encoders of speech models in transformers do."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(64, 64), rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate and torch.rand([]) < self.rate:
            return x
        return self.layer(x)


def test_no_layer_is_skipped_by_chance() -> None:
    model = nn.Sequential(*(LayerDrop(0.9) for _ in range(4)))
    kept = nn.Sequential(*(LayerDrop(0) for _ in range(4)))
    assert estimate(model, (8, 64)).parts == estimate(kept, (8, 64)).parts


class Adds(nn.Module):
    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(64, 64), make

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.make(x.shape)


def test_many_random_numbers_are_made_once() -> None:
    assert same(estimate(Adds(torch.rand), (8, 64)), estimate(Adds(torch.zeros), (8, 64)))


class Masked(nn.Module):
    """Replaces what a mask of NumPy selects by a weight, as speech models of transformers do."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.layer, self.own, self.mask = nn.Linear(8, 8), nn.Parameter(torch.zeros(8)), mask

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        mask = torch.tensor(self.mask) if self.mask is not None else x[:, 0] > 0
        x[mask] = self.own
        return x


def test_a_mask_that_is_known_may_select_and_another_is_refused_in_the_backward_pass() -> None:
    assert estimate(Masked([True, False, True]), (3, 8), device="cpu").phases
    with pytest.raises(ConfigError, match=r"^the backward pass depends on the values of a tensor: aten.nonz"):
        estimate(Masked(None), (3, 8), device="cpu")
