"""Airbench: whitening by the first samples of rank 0, filters of one norm, predictions that know no side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.data.types import ImageSpec
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.nn.model_code import build_model
from models.airbench.model import PATCH, initialise_from_samples
from tests.support.fake_backend import FakeBackend
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import (
    CPU,
    MemoryRecord,
    clone,
    largest_difference,
    random_data,
    small_config,
    small_plan,
)
from train.build import make_job
from train.job import Job, Progress
from train.loop import load_state_dict, optimizer_step, state_dict

SPEC = ImageSpec.square("noise", 16, 10, mean=(0.5,) * 3, std=(0.25,) * 3)
FILTERS = "whitening.filters"
OPTIMIZER = {
    "optimizer": "muon",
    "muon_learning_rate": 0.1,
    "nesterov": True,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
}


def model_of(**options: Any) -> torch.nn.Module:
    return build_model("airbench", {"width": 4, "mirror": True} | options, SPEC, seed=0)


def job_of(
    *micro_batches: int, backend: Backend | None = None, whole_run: bool = True, **changes: Any
) -> Job:
    """A job in float64 on smooth random images, whose patches are far from white."""
    settings = OPTIMIZER | {"augment": "crop_alternate", "augment_pad": 1}
    config = small_config("airbench", **settings | changes)
    return make_job(
        config,
        small_plan(*micro_batches, norm_batch=4),
        random_data(config, shape=(3, 16, 16), train_size=24),
        hardware=CPU,
        backend=backend or Backend("cpu"),
        record=MemoryRecord(),
        dtype=torch.float64,
        whole_run=whole_run,
    )


def after(job: Job, *, steps: int) -> Mapping[str, Tensor]:
    progress = Progress()
    for _ in range(steps):
        optimizer_step(job, progress)
        progress.step += 1
    return clone(job.model.state_dict())


def test_the_first_layer_makes_patches_white() -> None:
    smooth = F.avg_pool2d(torch.randn(64, 3, 40, 40, generator=torch.Generator().manual_seed(0)), 5, 1) * 5
    weights = initialise_from_samples(model_of(), smooth)
    assert [*weights] == [FILTERS]
    features = len(weights[FILTERS]) // 2
    white = F.conv2d(smooth, weights[FILTERS]).transpose(0, 1).flatten(1)
    assert torch.equal(weights[FILTERS][:features], -weights[FILTERS][features:])
    covariance = white[:features] @ white[:features].T / white.shape[1]
    patches = F.unfold(smooth, PATCH).transpose(0, 1).flatten(1)
    assert not torch.allclose(patches @ patches.T / patches.shape[1], torch.eye(features), atol=0.2)
    # What is added to small variances shrinks them.
    assert torch.allclose(covariance, torch.eye(features), atol=0.02)


@pytest.mark.slow
def test_a_run_starts_from_what_rank_0_computes_and_its_checkpoint_has_it() -> None:
    class Sent(FakeBackend):
        """A rank that gets what another one has computed."""

        def broadcast(self, value: Any) -> Any:
            assert value is None or self.is_main
            return {FILTERS: torch.full((24, 3, PATCH, PATCH), 0.5)}

    untouched, job = job_of(8, whole_run=False), job_of(8)
    found = job.model.state_dict()[FILTERS]
    assert not torch.equal(found, untouched.model.state_dict()[FILTERS])
    assert torch.equal(found, job_of(4, 4).model.state_dict()[FILTERS])
    assert torch.equal(state_dict(job, Progress())["model"][FILTERS], found)
    said: list[str] = job.record.said  # type: ignore[attr-defined]
    assert said[0] == f"Weights: {FILTERS} of the first 24 training samples"
    sent = job_of(8, backend=Sent(rank=1, world=1))
    assert (sent.model.state_dict()[FILTERS] == 0.5).all()


def test_resuming_takes_the_filters_of_the_checkpoint() -> None:
    job, other = job_of(8), job_of(8)
    state = clone(state_dict(job, Progress()))
    state["model"][FILTERS] += 1
    load_state_dict(other, state)
    assert torch.equal(other.model.state_dict()[FILTERS], state["model"][FILTERS])


@pytest.mark.slow
def test_the_split_changes_nothing() -> None:
    whole, parts = after(job_of(8), steps=4), after(job_of(4, 4), steps=4)
    assert largest_difference(whole, parts) < 1e-9
    assert largest_difference(whole, after(job_of(8, seed=2), steps=4)) > 1e-3


def test_filters_keep_their_norm() -> None:
    job = job_of(8)
    before = clone(job.model.state_dict())
    weights = after(job, steps=2)
    for name in (name for name in weights if ".conv" in name):
        assert weights[name].square().mean(0).sum().item() == pytest.approx(1), name
        assert not torch.equal(weights[name], before[name]), name


def test_predictions_are_of_both_sides_and_training_is_of_one() -> None:
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model = model_of()
        assert not torch.allclose(model(images), model(images.flip(3)))
        model.eval()
        torch.testing.assert_close(model(images), model(images.flip(3)))
        other = model_of(mirror=False).eval()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(images), (other(images) + other(images.flip(3))) / 2)
        assert not torch.allclose(other(images), other(images.flip(3)))


def test_images_that_are_too_small_are_refused() -> None:
    tiny = ImageSpec.square("dots", 8, 10, mean=(0.5,), std=(0.25,))
    with pytest.raises(ConfigError, match="images of dots are 8x8, and Airbench needs 9 pixels a side"):
        build_model("airbench", {"width": 4, "mirror": True}, tiny, seed=0)
    smallest = ImageSpec.square("dots", 9, 10, mean=(0.5,), std=(0.25,))
    assert build_model("airbench", {"width": 4, "mirror": True}, smallest, seed=0)(
        torch.zeros(2, 1, 9, 9)
    ).shape == (2, 10)


def test_a_function_of_another_name_is_no_hook() -> None:
    """GPT-2 draws its weights in `initialise`."""
    config, record = small_lm_config(), MemoryRecord()
    known: dict[str, Any] = {"hardware": CPU, "backend": Backend("cpu"), "record": record}
    make_job(config, small_plan(4), text_data(config), whole_run=True, **known)
    assert not any(line.startswith("Weights") for line in record.said)
