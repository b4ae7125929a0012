"""A model that is too large to be tried is not said to depend on the split, nor to be independent of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.plan.show import why_norm_batch
from tests.support.training import data_of, small_config
from train.stock_layers import MOST_PARAMETERS, with_trial


def test_a_model_that_is_not_tried_is_reported_so() -> None:
    config = small_config("gpt2")
    data = data_of(config)
    facts = dataclasses.replace(data.facts, parameters=int(MOST_PARAMETERS) + 1, flop_per_sample=3e12)
    untried = with_trial(config, data.dataset.spec, facts)
    why = why_norm_batch(config, untried)
    assert "independent of the micro-batch: all layers (a trial takes 4,000 GFLOP)" in why
    assert "NOTE" not in why_norm_batch(config, facts)


class Recurrent(nn.Module):
    """A model whose forward pass makes tensors, of the default precision or of a given one."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype, self.drop, self.head = dtype, nn.Dropout(0.1), nn.Linear(16, 10)
        self.lstm = nn.LSTM(28, 16, batch_first=True)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        state = torch.zeros(1, len(images_NCHW), 16, dtype=self.dtype)
        _, (hidden, _) = self.lstm(images_NCHW[:, 0], (state, state))
        if self.dtype == torch.float32:  # with one of the default precision beside it
            hidden = hidden * torch.ones(16)
        return self.head(self.drop(hidden[0]))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("dtype", "inexact"),
    [(None, ()), (torch.float32, ("all layers (they do not run in double precision)",))],
)
def test_a_forward_pass_may_make_tensors(
    dtype: torch.dtype | None, inexact: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("lenet5")
    data = data_of(config)
    monkeypatch.setattr("train.stock_layers.build_model", lambda *_, **__: Recurrent(dtype))
    assert with_trial(config, data.dataset.spec, data.facts).inexact == inexact
    assert torch.get_default_dtype() == torch.float32


class Step(nn.Module):
    """A block whose forward pass makes a matrix of the default precision."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.1), nn.Linear(28, 28)

    def forward(self, x_NF: Tensor) -> Tensor:
        return self.drop(self.linear(x_NF)) @ torch.eye(28)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Step(), Step()]), nn.Linear(28, 10)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        x_NF = images_NCHW[:, 0, 0]
        for block in self.blocks:
            x_NF = block(x_NF)
        return self.head(x_NF)  # type: ignore[no-any-return]


def test_blocks_of_such_a_model_are_tried_with_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("lenet5", grad_checkpoint="blocks")
    data = data_of(config)
    monkeypatch.setattr("train.stock_layers.build_model", lambda *_, **__: Stack())
    assert with_trial(config, data.dataset.spec, data.facts).inexact == ()


def test_an_error_in_any_precision_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config("lenet5")
    data = data_of(config)
    monkeypatch.setattr("train.stock_layers.build_model", lambda *_, **__: Recurrent(torch.int64))
    with pytest.raises(ConfigError, match=r"^models/lenet5.*RuntimeError"):
        with_trial(config, data.dataset.spec, data.facts)
