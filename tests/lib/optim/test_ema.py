"""The average of the weights: its formula, its swap, its resumption."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lib.optim.ema import Ema, decay_for, horizon
from tests.support.training import MemoryRecord, random_data, small_config, small_job, small_plan
from train.job import Progress
from train.loop import optimizer_step


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


def test_a_decay_that_follows_the_batch_reaches_back_over_as_many_samples() -> None:
    assert decay_for(0.99, effective_batch=512, base_batch=None) == 0.99
    assert decay_for(0.99, effective_batch=256, base_batch=256) == 0.99
    # Two steps of one sample forget as much as a step of two: shares of the past are multiplied.
    assert decay_for(0.99, effective_batch=512, base_batch=256) == pytest.approx(0.99 * 0.99, rel=1e-15)
    for batch in (64, 256, 1024):
        samples = horizon(decay_for(0.999, effective_batch=batch, base_batch=256)) * batch
        assert samples == pytest.approx(1000 * 256, rel=0.002)
    assert horizon(0.99) == pytest.approx(100.0)
    assert horizon(decay_for(0.9999999, effective_batch=1, base_batch=2**20)) > 1e12
    assert horizon(decay_for(1 - 1e-15, effective_batch=1, base_batch=2**20)) == math.inf


def averaging(**changes: object) -> tuple[float, list[str]]:
    """The decay that a step of a job with 12 samples shows, and what was said of it."""
    record = MemoryRecord()
    config = small_config(ema=True, **{"ema_decay": 0.9} | changes)
    data = random_data(config, shape=(1, 28, 28), train_size=24)
    job = small_job(config, small_plan(6, 6), data, record=record)
    assert job.ema is not None
    name, weight = next(iter(job.model.named_parameters()))
    before = weight.detach().clone()
    optimizer_step(job, Progress())
    average = job.ema.state_dict()[name]
    kept = ((average - weight) / (before - weight)).detach()
    torch.testing.assert_close(kept, kept.mean().expand_as(kept), rtol=1e-9, atol=1e-9)
    return float(kept.mean()), [line for line in record.said if "verage" in line]


def test_a_job_averages_by_the_decay_for_its_batch_and_says_how_far_back() -> None:
    decay, said = averaging(ema_base_batch=6, max_steps=100)
    assert decay == pytest.approx(0.81)
    told = "decay 0.81; 0.9 for 6 samples, scaled to 12; it reaches back about 5.3 steps, 63 samples"
    assert said == [f"Average of the weights: {told}"]
    decay, said = averaging(max_steps=31)
    assert decay == pytest.approx(0.9)
    assert said == ["Average of the weights: decay 0.9; it reaches back about 10.0 steps, 120 samples"]


def test_an_average_that_is_too_long_for_its_run_is_told() -> None:
    _, said = averaging(max_steps=29)
    assert len(said) == 2 and "more than a third of the 29 steps" in said[1]
