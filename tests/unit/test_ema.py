"""The average of the weights: its formula, its swap, its resumption."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lib.ema import Ema


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def change(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_it_is_the_weighted_sum_of_all_weights_so_far() -> None:
    model = network().double()
    ema = Ema(model, decay=0.9)
    history = [values(model)]
    for step in range(3):
        change(model, step)
        ema.update()
        history.append(values(model))
    shares = [0.9**3, 0.1 * 0.9**2, 0.1 * 0.9, 0.1]
    for average, *past in zip(ema.state_dict().values(), *history, strict=True):
        expected = sum(share * weight for share, weight in zip(shares, past, strict=True))
        torch.testing.assert_close(average, expected, rtol=1e-13, atol=1e-15)


def test_inside_the_model_holds_the_averages_and_after_it_its_own_bits() -> None:
    model = network()
    ema = Ema(model, decay=0.5)
    change(model, 0)
    ema.update()
    own, addresses = values(model), [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(ZeroDivisionError), ema.averaged():
        assert all(map(torch.equal, values(model), ema.state_dict().values()))
        assert not torch.equal(values(model)[0], own[0])
        raise ZeroDivisionError
    assert all(map(torch.equal, values(model), own))
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


def test_buffers_are_those_of_the_model() -> None:
    model = network()
    ema = Ema(model, decay=0.5)
    model(torch.randn(5, 1, 4, 4))
    before = model[1].running_mean.clone()
    with ema.averaged():
        assert torch.equal(model[1].running_mean, before)


def test_resumption_is_bit_exact() -> None:
    model = network()
    ema = Ema(model, decay=0.9)
    change(model, 0)
    ema.update()
    saved = copy.deepcopy((model.state_dict(), ema.state_dict()))

    resumed_model = network()
    resumed = Ema(resumed_model, decay=0.9)
    resumed_model.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, average in ((model, ema), (resumed_model, resumed)):
        change(each, 1)
        average.update()
    assert all(map(torch.equal, ema.state_dict().values(), resumed.state_dict().values()))


def test_it_follows_a_model_that_is_given_another_layout() -> None:
    model = network()
    ema = Ema(model, decay=0.5)
    model.to(memory_format=torch.channels_last)
    change(model, 0)
    ema.update()
    moved = (ema.state_dict()["0.weight"] - network()[0].weight).abs().max()
    assert moved > 0.1


def test_averages_of_another_model_are_refused() -> None:
    with pytest.raises(KeyError, match="weight"):
        Ema(network(), decay=0.5).load_state_dict({"other.weight": torch.zeros(1)})


def test_misuse_is_an_error() -> None:
    ema = Ema(network(), decay=0.5)
    with ema.averaged():
        with pytest.raises(AssertionError):
            ema.update()
        with pytest.raises(AssertionError), ema.averaged():
            pass
