"""Recurrent layers of a simulated GPU: sizes that cuDNN asked for, and shapes of real layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib.memory import estimate
from lib.memory.recurrent import reserve_values, workspace_values
from lib.memory.simulation import simulation


def test_the_formulas_of_recurrent_layers_give_the_published_sizes() -> None:
    """What cuDNN asked for in pytorch/pytorch#2895, in bytes: 4 layers of 320, 250 steps of 100 samples."""
    weights = sum(320 * (width + 320) for width in (123, 320, 320, 320))
    for cell, gates, reserve, workspace in (
        ("lstm", 4, 736_000_000, 17_730_560),
        ("gru", 3, 864_000_000, 13_169_920),
    ):
        assert 4 * reserve_values(cell, steps=25_000, layers=4, width=320) == reserve
        assert (
            4 * workspace_values(cell, batch=100, layers=4, width=320, weights=gates * weights) == workspace
        )


@pytest.mark.slow
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.1}])
def test_recurrent_layers_have_the_shapes_of_real_ones(
    cell: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    """In one kernel whose reserve lives from the forward to the backward pass; so does autograd's."""
    real = cell(8, 16, **options)
    with simulation("cuda"):
        fake = cell(8, 16, **options)
        for half in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                output, state = fake(torch.zeros(12, 4, 8))
            state = state if isinstance(state, tuple) else (state,)
            assert {each.dtype for each in (output, *state)} == {torch.bfloat16 if half else torch.float32}
            (output.sum() + sum(each.sum() for each in state)).backward()
            assert all(each.grad.shape == each.shape for each in fake.parameters())
    expected, final = real(torch.zeros(12, 4, 8))
    final = final if isinstance(final, tuple) else (final,)
    assert [output.shape, *(each.shape for each in state)] == [
        expected.shape,
        *(each.shape for each in final),
    ]


@pytest.mark.slow
def test_the_reserve_of_a_recurrent_layer_is_an_activation() -> None:
    report = estimate(lambda: nn.LSTM(64, 128), (50, 16, 64), precision="fp32")
    reserve = 4 * reserve_values("lstm", steps=50 * 16, layers=1, width=128)
    sizes = [byte_count for _, byte_count in report.trace.events]
    assert sizes.count(reserve) == sizes.count(-reserve) == 2, "once in each step"
    projected = nn.LSTM(8, 16, proj_size=4)
    with simulation("cuda"):
        assert (
            nn.LSTM(8, 16, proj_size=4)(torch.zeros(5, 2, 8))[0].shape
            == projected(torch.zeros(5, 2, 8))[0].shape
        )
