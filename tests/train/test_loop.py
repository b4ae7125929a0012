"""The loop: what a step computes, whatever its cut; what an evaluation sees; going on bit for bit."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.data.loader import Batch
from lib.errors import ToolkitError
from lib.optim.lr_schedule import learning_rate_factor
from tests.support.training import (
    MemoryRecord,
    Wrapped,
    clone,
    largest_difference,
    random_data,
    small_config,
    small_job,
    small_plan,
    trained,
)
from train.job import Job, Progress, evaluate
from train.loop import accumulate_gradients, load_state_dict, optimizer_step, state_dict, train
from train.tasks.base import Forward, Sums, Task
from train.training_data import TrainingData

EXACT = 1e-12
CUTS = {"whole": (24,), "even": (8, 8, 8), "ragged": (10, 10, 4), "single": (1,) * 24}


class Masked(Wrapped):
    """Counts only the labels below 6: another number in every micro-batch, known on the device only."""

    def training(self, forward: Forward, batch: Batch) -> Sums:
        mask_N = batch.targets < 6
        loss_N = nn.functional.cross_entropy(forward(batch.inputs), batch.targets, reduction="none")
        return Sums((loss_N * mask_N).sum(), mask_N.sum(), {})


class MeanOfMeans(Masked):
    """What Masked must not come out as: every micro-batch weighs the same."""

    def training(self, forward: Forward, batch: Batch) -> Sums:
        sums, rows = super().training(forward, batch), len(batch.targets)
        assert isinstance(sums.count, Tensor)
        return Sums(sums.loss / sums.count.clamp(min=1) * rows, rows, {})


def lenet_data(**sizes: int) -> TrainingData:
    return random_data(small_config(), shape=(1, 28, 28), **({"train_size": 40, "test_size": 10} | sizes))


def lenet_job(cut: tuple[int, ...] = (8, 8), **options: Any) -> Job:
    config_changes = options.pop("config", {})
    data = options.pop("data", None) or lenet_data()
    return small_job(small_config(**config_changes), small_plan(*cut), data, **options)


def resnet_job(cut: tuple[int, ...], *, norm_batch: int, **changes: Any) -> Job:
    config = small_config("resnet18", norm_batch=norm_batch, **changes)
    data = random_data(config, shape=(3, 8, 8), train_size=40, test_size=10)
    return small_job(config, small_plan(*cut, norm_batch=norm_batch), data, record=MemoryRecord())


def parameters(job: Job) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in job.model.parameters()]


def record_of(job: Job) -> MemoryRecord:
    assert isinstance(job.record, MemoryRecord)
    return job.record


# The step


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
def test_the_cut_changes_nothing(cut: str) -> None:
    assert largest_difference(trained(lenet_job(CUTS["whole"])), trained(lenet_job(CUTS[cut]))) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_what_the_device_counts_is_counted_over_the_whole_step(cut: str, grad_clip: float) -> None:
    options: dict[str, Any] = {"task": Masked, "config": {"grad_clip": grad_clip}}
    whole = trained(lenet_job(CUTS["whole"], **options))
    assert largest_difference(whole, trained(lenet_job(CUTS[cut], **options))) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["even", "ragged", "single"])
def test_a_mean_of_means_is_something_else(cut: str) -> None:
    whole = trained(lenet_job(CUTS["whole"], task=MeanOfMeans))
    assert largest_difference(whole, trained(lenet_job(CUTS["whole"], task=Masked))) <= EXACT
    assert largest_difference(whole, trained(lenet_job(CUTS[cut], task=MeanOfMeans))) > 1e-5


def test_a_step_is_the_gradient_of_the_mean_loss() -> None:
    job = lenet_job((10, 6), config={"momentum": 0.0, "weight_decay": 0.0, "max_steps": 1})
    weights = list(job.model.parameters())
    batches = job.train_loader.micro_batches(step=0, target=16, sizes=(16,))
    batch = next(batches)
    loss = nn.functional.cross_entropy(job.model(batch.inputs), batch.targets)
    gradients = torch.autograd.grad(loss, weights)
    expected = [
        weight.detach() - 0.05 * gradient for weight, gradient in zip(weights, gradients, strict=True)
    ]
    trained(job)
    for weight, value in zip(weights, expected, strict=True):
        assert torch.allclose(weight, value, rtol=EXACT, atol=EXACT)


def test_the_gradient_of_a_rank_is_the_part_of_a_mean_over_ranks() -> None:
    job = lenet_job((16,))
    batch = next(job.train_loader.micro_batches(step=0, target=16, sizes=(8,)))
    loss = nn.functional.cross_entropy(job.model(batch.inputs), batch.targets)
    expected = torch.autograd.grad(loss, list(job.model.parameters()))
    shared = replace(job, plan=small_plan(8, world=2))  # this process is the first of two
    assert len([*accumulate_gradients(shared, Progress())]) == 1
    for weight, gradient in zip(job.model.parameters(), expected, strict=True):
        assert weight.grad is not None
        assert torch.allclose(weight.grad, gradient, rtol=EXACT, atol=EXACT)


def test_a_step_looks_at_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the system for each micro-batch would cost a small network as much as a tenth of its step."""
    job, progress = lenet_job(), Progress()
    optimizer_step(job, progress)
    looked = list[str]()

    def counted(name: str, call: Any) -> Any:
        def look(*arguments: Any, **options: Any) -> Any:
            looked.append(name)
            return call(*arguments, **options)

        return look

    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    monkeypatch.setattr(io, "open", counted("io.open", io.open))
    optimizer_step(job, progress)
    assert looked == []
    assert Path(__file__).exists() and looked, "such calls are seen"


def test_gradients_are_clipped_to_their_norm_over_all_parameters() -> None:
    limit = 0.01
    job = lenet_job(config={"grad_clip": limit, "momentum": 0.0, "weight_decay": 0.0, "max_steps": 1})
    before = parameters(job)
    trained(job)
    steps = [after - own for after, own in zip(parameters(job), before, strict=True)]
    norm = math.sqrt(sum(float(step.square().sum()) for step in steps))
    assert norm == pytest.approx(0.05 * limit, rel=1e-3)


def rates_of(job: Job) -> list[float]:
    """The learning rate of every step, which all groups of parameters share."""
    rates: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        rates.append(rate)

    job.optimizer.register_step_pre_hook(note)
    trained(job)
    return rates


def test_every_step_has_the_learning_rate_of_its_middle() -> None:
    changes = {"schedule": "cosine", "warmup_pct": 30, "lr_min_ratio": 0.1, "max_steps": 10}
    job = lenet_job(config=changes, record=MemoryRecord())
    rates = rates_of(job)
    expected = [
        0.05
        * learning_rate_factor(
            (step + 0.5) / 10,
            schedule="cosine",
            warmup_fraction=0.3,
            warmup_start=0.01,
            min_ratio=0.1,
            step_fractions=[],
            gamma=None,
        )
        for step in range(10)
    ]
    assert rates == expected and len(set(rates)) > 5
    assert record_of(job).of_kind("train")[-1]["learning_rate"] == expected[-1]


def test_steps_of_the_learning_rate_are_as_configured() -> None:
    changes = {"schedule": "step", "lr_step_pct_list": (40, 70), "lr_step_gamma": 0.5, "max_steps": 10}
    assert rates_of(lenet_job(config=changes)) == [0.05] * 4 + [0.025] * 3 + [0.0125] * 3


def test_the_average_follows_every_step() -> None:
    job = lenet_job(config={"ema": True, "ema_decay": 0.75})
    averages, history = parameters(job), []
    job.optimizer.register_step_post_hook(lambda *_: history.append(parameters(job)))
    trained(job)
    for weights in history:
        averages = [0.75 * mean + 0.25 * weight for mean, weight in zip(averages, weights, strict=True)]
    assert job.ema is not None and len(history) == 3
    for own, expected in zip(job.ema.state_dict().values(), averages, strict=True):
        assert torch.allclose(own, expected, rtol=EXACT, atol=EXACT)


# Evaluation


def reference(job: Job) -> dict[str, float]:
    """Loss and accuracy over the whole evaluation part at once, by definition."""
    (batch,) = job.eval_loader.batches(rank=0, world=1, batch_size=job.eval_loader.size)
    with torch.no_grad():
        log_probabilities_NK = job.model.eval()(batch.inputs).log_softmax(dim=1)
    job.model.train()
    own_N = log_probabilities_NK.gather(1, batch.targets[:, None])
    correct_N = log_probabilities_NK.argmax(dim=1) == batch.targets
    return {"loss": -float(own_N.mean()), "accuracy": float(correct_N.double().mean())}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 8, 9, 37])
def test_evaluation_is_the_mean_over_every_sample(size: int) -> None:
    job = lenet_job(data=lenet_data(test_size=size))
    trained(job)
    result = evaluate(job)
    assert result.pop("samples") == size
    assert result == pytest.approx(reference(job), rel=1e-9)


def test_evaluation_is_of_the_average_and_leaves_the_weights_alone() -> None:
    job = lenet_job(config={"ema": True, "ema_decay": 0.5})
    trained(job)
    own, raw = clone(job.model.state_dict()), reference(job)
    result = evaluate(job)
    assert all(torch.equal(tensor, own[name]) for name, tensor in job.model.state_dict().items())
    assert job.ema is not None
    with job.ema.averaged():
        expected = reference(job)
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    assert abs(expected["loss"] - raw["loss"]) > 1e-6 * raw["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("norm_batch", [0, 4])
def test_evaluation_moves_no_running_statistics(norm_batch: int) -> None:
    job = resnet_job((8, 8), norm_batch=norm_batch)
    trained(job)
    before = {name: tensor.clone() for name, tensor in [*job.model.named_buffers()]}
    evaluate(job)
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.named_buffers())
    assert all(module.training for module in job.model.modules())


class Broken(Wrapped):
    def evaluation(self, forward: Forward, batch: Batch) -> Sums:  # noqa: ARG002
        raise KeyboardInterrupt


def test_an_interrupted_evaluation_leaves_the_job_ready_to_train() -> None:
    job = lenet_job(config={"ema": True, "ema_decay": 0.5}, task=Broken)
    own = clone(job.model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        evaluate(job)
    assert job.model.training
    assert all(torch.equal(tensor, own[name]) for name, tensor in job.model.state_dict().items())


# Going on


def rule(name: str) -> dict[str, Any]:
    if name == "sgd":
        return {}
    adam = {"optimizer": name.partition(" ")[0], "adam_8bit": name.endswith("in 8 bits")}
    return adam | {"momentum": None, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "at"),
    [
        pytest.param(optimizer, at, marks=[] if at == 4 or optimizer == "sgd" else [pytest.mark.long])
        for optimizer in ("sgd", "adam", "adamw", "adamw in 8 bits")
        for at in (1, 4, 5)
    ],
)
def test_going_on_in_the_middle_ends_in_the_same_bits(optimizer: str, at: int) -> None:
    changes = {
        **rule(optimizer),
        "ema": True,
        "ema_decay": 0.9,
        "max_steps": 6,
        "checkpoint_interval_steps": at,
        "schedule": "cosine",
        "lr_min_ratio": 0.0,
    }
    whole = resnet_job((8, 8), norm_batch=4, **changes)
    trained(whole)
    resumed = resnet_job((8, 8), norm_batch=4, **changes)
    progress = load_state_dict(resumed, clone(record_of(whole).states[at]))
    assert progress.step == at
    train(resumed, progress)
    one, other = state_dict(whole, Progress()), state_dict(resumed, Progress())
    assert all(torch.equal(tensor, other["model"][name]) for name, tensor in one["model"].items())
    assert whole.ema is not None and resumed.ema is not None
    averages = resumed.ema.state_dict()  # of the job itself: what is saved could be wrong twice
    assert all(torch.equal(tensor, averages[name]) for name, tensor in whole.ema.state_dict().items())
    assert tensors(one["optimizer"]).keys() == tensors(other["optimizer"]).keys()
    for place, tensor in tensors(one["optimizer"]).items():
        assert torch.equal(tensor, tensors(other["optimizer"])[place]), place


def tensors(value: Any, place: str = "") -> dict[str, Tensor]:
    """All tensors in nested dicts and lists, by their place."""
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Tensor):
        return {place: value}
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    return {name: tensor for key, item in items for name, tensor in tensors(item, f"{place}/{key}").items()}


def test_progress_is_kept() -> None:
    job = lenet_job()
    progress = Progress(step=7, seconds=1.5, best=0.25)
    assert load_state_dict(lenet_job(), state_dict(job, progress)) == progress


def test_a_run_that_has_nothing_left_to_do_tells_its_result() -> None:
    job = lenet_job(record=MemoryRecord())
    result = train(job, Progress(step=3))
    assert result["samples"] == 10 and result["loss"] > 0
    assert not record_of(job).rows and not record_of(job).saved


# Divergence


class Diverging(Wrapped):
    """The loss (or one weight) is not finite from the second step on."""

    value = math.nan
    weight = False

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.calls = 0

    def training(self, forward: Forward, batch: Batch) -> Sums:
        sums = super().training(forward, batch)
        self.calls += 1
        if self.calls < 3 or self.weight:
            return sums
        return Sums(sums.loss.detach() * self.value + sums.loss * 0, sums.count, sums.metrics)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("interval", [1, 2])
def test_a_loss_that_is_not_finite_stops_before_it_is_saved(
    value: float, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Diverging, "value", value)
    changes = {"checkpoint_interval_steps": interval, "log_interval_steps": 100, "max_steps": 4}
    job = lenet_job(config=changes, task=Diverging, record=MemoryRecord())
    advice = "; lower" if interval == 1 else ", or none was finite; look at the data"
    with pytest.raises(ToolkitError, match=f"the loss is {value} at step 2: training has diverged{advice}"):
        train(job, Progress())
    assert record_of(job).saved == [(1, False)] * (interval == 1)
    assert [row["loss"] for row in record_of(job).of_kind("train")][-1] == pytest.approx(value, nan_ok=True)


def test_a_weight_that_is_not_finite_stops_before_it_is_saved() -> None:
    job = lenet_job(config={"checkpoint_interval_steps": 1}, record=MemoryRecord())
    last = list(job.model.parameters())[-1]
    steps: list[int] = []

    def spoil(*_: object) -> None:
        steps.append(1)
        if len(steps) == 2:
            last.data[0] = math.inf

    job.optimizer.register_step_post_hook(spoil)
    with pytest.raises(ToolkitError, match=r"^a weight is not finite at step 2"):
        train(job, Progress())
    assert [step for step, _ in record_of(job).saved] == [1]
