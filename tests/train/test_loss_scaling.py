"""Training in half precision: what is in it; the scale cancels out; a step that overflows is not made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch
from tests.support.training import (
    MemoryRecord,
    Wrapped,
    clone,
    random_data,
    small_config,
    small_job,
    small_plan,
)
from train.job import Job, Progress
from train.loop import load_state_dict, state_dict, train
from train.tasks.base import Forward, Sums, Task

SCALE = 1024.0
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.01},
    # A large eps: else a step is the sign of the gradient, whatever its scale.
    "adamw": {"optimizer": "adamw", "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1.0},
}


class Overflowing(Wrapped):
    """The gradients of one step are too large for half precision; its loss is not."""

    def __init__(self, task: Task, *, at: int) -> None:
        super().__init__(task)
        self.at, self.calls = at, 0

    def training(self, forward: Forward, batch: Batch) -> Sums:
        sums = super().training(forward, batch)
        self.calls += 1
        if self.calls == self.at + 1:
            loss: Any = sums.loss
            loss.register_hook(lambda gradient: gradient * math.inf)
        return sums


def scaled_job(precision: str = "fp16", *, at: int = -1, **changes: Any) -> Job:
    config = small_config("resnet18", norm_batch=4, **({"max_steps": 1} | changes))
    data = random_data(config, shape=(3, 8, 8), train_size=40, test_size=10)
    job = small_job(
        config,
        small_plan(16, norm_batch=4, precision=precision),
        data,
        record=MemoryRecord(),
        task=lambda task: Overflowing(task, at=at),
        dtype=torch.float32,
    )
    if job.scaler.is_enabled():
        # The default start is made for the first steps to be skipped until it fits.
        job.scaler.load_state_dict({**job.scaler.state_dict(), "scale": SCALE})
    return job


class Watched(Wrapped):
    """Remembers where products are in half precision."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.half: dict[str, set[bool]] = {"training": set(), "backward": set(), "evaluation": set()}

    def note(self, where: str) -> None:
        self.half[where].add(torch.is_autocast_enabled("cpu"))

    def training(self, forward: Forward, batch: Batch) -> Sums:
        self.note("training")
        sums = super().training(forward, batch)
        loss: Any = sums.loss
        loss.register_hook(lambda _: self.note("backward"))
        return sums

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        self.note("evaluation")
        return super().evaluation(forward, batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_forward_passes_alone_are_in_half_precision(precision: str) -> None:
    config, half = small_config(max_steps=1), precision != "fp32"
    data = random_data(config, shape=(1, 28, 28), train_size=16, test_size=8)
    plan = small_plan(8, 8, precision=precision)
    job = small_job(config, plan, data, task=Watched, dtype=torch.float32)
    train(job, Progress())
    assert isinstance(job.task, Watched)
    assert job.task.half == {"training": {half}, "backward": {False}, "evaluation": {half}}


def movement(job: Job, *, after: int = 0) -> Tensor:
    """How far the weights go in the steps that follow step `after`."""
    before = torch.cat([parameter.detach().flatten().clone() for parameter in job.model.parameters()])
    train(job, Progress(step=after))
    return torch.cat([parameter.detach().flatten() for parameter in job.model.parameters()]) - before


@pytest.mark.slow
@pytest.mark.parametrize("grad_clip", [0.0, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_scale_cancels_out(optimizer: str, grad_clip: float) -> None:
    rule = OPTIMIZERS[optimizer] | {"grad_clip": grad_clip}
    expected, found = movement(scaled_job("fp32", **rule)), movement(scaled_job("fp16", **rule))
    assert float(expected.norm()) > 1e-4
    # Half precision through a dozen normalised layers costs a tenth; a scale left in, a factor of a thousand.
    assert float((found - expected).norm() / expected.norm()) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("grad_clip", [0.0, 0.5])
def test_a_step_that_overflows_leaves_the_weights_and_lowers_the_scale(grad_clip: float) -> None:
    job = scaled_job(at=0, grad_clip=grad_clip, ema=True, ema_decay=0.5)
    assert float(movement(job).abs().max()) == 0
    assert job.scaler.get_scale() == SCALE / 2
    assert job.ema is not None
    for weight, average in zip(job.model.parameters(), job.ema.state_dict().values(), strict=True):
        assert torch.equal(weight, average)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_step_after_a_skipped_one_is_as_if_it_came_first(optimizer: str) -> None:
    rule = OPTIMIZERS[optimizer] | {"max_steps": 2}
    skipped, expected = scaled_job(at=0, **rule), movement(scaled_job(**rule), after=1)
    found = movement(skipped)
    assert skipped.scaler.get_scale() == SCALE / 2
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.slow
def test_what_an_overflowing_step_saw_still_counts_for_the_running_statistics() -> None:
    """Its forward pass is sound: they are those of a step that was made."""
    skipped, made = scaled_job(at=0), scaled_job()
    train(skipped, Progress())
    train(made, Progress())
    buffers = dict(made.model.named_buffers())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in skipped.model.named_buffers())


@pytest.mark.slow
def test_the_scale_is_kept_in_a_checkpoint() -> None:
    whole = scaled_job(at=1, max_steps=4, checkpoint_interval_steps=2)
    train(whole, Progress())
    assert isinstance(whole.record, MemoryRecord)
    resumed = scaled_job(max_steps=4)
    train(resumed, load_state_dict(resumed, clone(whole.record.states[2])))
    one, other = state_dict(whole, Progress()), state_dict(resumed, Progress())
    assert one["scaler"] == other["scaler"] and one["scaler"]["scale"] == SCALE / 2
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())
