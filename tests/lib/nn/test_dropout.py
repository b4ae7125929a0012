"""Dropout: masks that follow from the seed and the sample, and the share that was asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lib.devices.base import Backend
from lib.nn.dropout import Dropout, dropouts, key_samples
from tests.support.configs import make_config
from tests.support.fake_backend import FakeBackend
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import largest_difference, small_job, small_plan, trained
from train.job import Job, Progress
from train.loop import load_state_dict, state_dict, train

CPU = torch.device("cpu")


def mask(module: Dropout, *, first: int, count: int, seed: int = 1, width: int = 4096) -> Tensor:
    key_samples([module], seed=seed, first=first, count=count, device=CPU)
    return module(torch.ones(count, 2, width // 2)).flatten(1) != 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_and_the_mean_are_those_asked_for(rate: float) -> None:
    module = Dropout(rate, site=0)
    key_samples([module], seed=1, first=0, count=16, device=CPU)
    out = module(torch.full((16, 4096), 3.0))
    deviation = (rate * (1 - rate) / out.numel()) ** 0.5
    assert (out == 0).double().mean().item() == pytest.approx(rate, abs=5 * deviation)
    kept = out[out != 0]
    assert kept.unique().numel() == 1 and kept[0].item() == pytest.approx(3 / (1 - rate), rel=2e-4)


def test_masks_are_of_the_sample_not_of_the_cut() -> None:
    module = Dropout(0.5, site=3)
    whole = mask(module, first=40, count=6)
    parts = torch.cat([mask(module, first=40, count=4), mask(module, first=44, count=2)])
    assert torch.equal(whole, parts)


def test_masks_differ_between_samples_seeds_sites_and_halves() -> None:
    one = mask(Dropout(0.5, site=0), first=0, count=2)
    others = [
        one[1],
        mask(Dropout(0.5, site=0), first=0, count=1, seed=2)[0],
        mask(Dropout(0.5, site=1), first=0, count=1)[0],
        mask(Dropout(0.5, site=0), first=1 << 40, count=1)[0],
        one[0].roll(1),
        one[0].roll(4),
    ]
    for other in others:  # two that have nothing to do with each other agree on half of their elements
        assert (one[0] == other).double().mean().item() == pytest.approx(0.5, abs=0.04)


def test_it_is_off_in_evaluation_and_at_zero() -> None:
    x = torch.randn(3, 5)
    assert Dropout(0.9, site=0).eval()(x) is x
    assert Dropout(0.0, site=0)(x) is x


def test_training_without_keys_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="key_samples comes first"):
        Dropout(0.5, site=0)(torch.ones(2, 3))
    module = Dropout(0.5, site=0)
    key_samples([module], seed=1, first=0, count=2, device=CPU)
    with pytest.raises(RuntimeError, match="3 rows of dropout are not those of 2 samples"):
        module(torch.ones(3, 3))


def job_of(*micro_batches: int, rate: float = 0.3, backend: Backend | None = None, **changes: object) -> Job:
    config = small_lm_config(**changes)
    config = config.replace(model_options={**config.model_options, "dropout": rate})
    plan = small_plan(*micro_batches, world=backend.world if backend is not None else 1)
    return small_job(config, plan, text_data(config), backend=backend)


@pytest.mark.slow
def test_training_does_not_depend_on_the_cut() -> None:
    whole = trained(job_of(6))
    assert largest_difference(whole, trained(job_of(2, 2, 2))) <= 1e-12
    assert largest_difference(whole, trained(job_of(4, 2))) <= 1e-12
    assert largest_difference(whole, trained(job_of(6, rate=0.0))) > 1e-4, "nothing is dropped"
    assert len(dropouts(job_of(6).model)) == 5


def remember_keys(job: Job, seen: list[Tensor]) -> Job:
    """Put the keys of each forward pass of training into `seen`."""

    def remember(module: Dropout, *_: object) -> None:
        if module.training:
            seen.append(module.sample_keys.clone())

    job.dropouts[0].register_forward_hook(remember)
    return job


@pytest.mark.slow
def test_ranks_have_the_masks_of_their_own_samples() -> None:
    whole: list[Tensor] = []
    train(remember_keys(job_of(6, max_steps=1), whole), Progress())
    shares: list[Tensor] = []
    for rank in range(2):
        job = job_of(2, 1, backend=FakeBackend(rank=rank, world=2), max_steps=1)
        train(remember_keys(job, shares), Progress())
    assert torch.equal(torch.cat(shares), whole[0])


@pytest.mark.slow
def test_steps_have_masks_of_their_own_and_a_resumed_run_those_of_the_whole() -> None:
    seen: list[Tensor] = []

    def remembered(job: Job) -> Job:
        return remember_keys(job, seen)

    whole = trained(remembered(job_of(6)))
    assert len({tuple(keys.tolist()) for keys in seen}) == 3

    first = job_of(6, max_steps=2)
    progress = Progress()
    train(first, progress)
    second = job_of(6)
    train(second, load_state_dict(second, state_dict(first, progress)))
    state = second.model.state_dict()
    assert all(torch.equal(state[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_it_compiles_once_for_all_steps() -> None:
    torch._dynamo.reset()
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    module = nn.Sequential(Dropout(0.5, site=0))
    compiled = torch.compile(module, backend=counting, dynamic=False)
    for first in (0, 3, 6):
        key_samples(dropouts(module), seed=1, first=first, count=3, device=CPU)
        x = torch.ones(3, 8)
        assert torch.equal(compiled(x), module(x))
    assert len(graphs) == 1


def test_the_option_reaches_the_model() -> None:
    assert make_config("gpt2").model_options["dropout"] == 0.0
