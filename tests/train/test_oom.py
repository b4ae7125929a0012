"""Memory that runs out: the same step in smaller pieces, the same weights, or one line that says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lib.config import Config
from lib.data.loader import Batch
from lib.devices.backend import is_out_of_memory
from lib.devices.base import Backend
from lib.errors import ToolkitError
from lib.plan.types import Plan
from tests.support.fake_backend import FakeBackend
from tests.support.training import (
    MemoryRecord,
    Wrapped,
    largest_difference,
    random_data,
    small_config,
    small_job,
    small_plan,
    trained,
)
from train.job import Job, Progress
from train.loop import train
from train.tasks.base import Forward, Sums, Task
from train.training_data import TrainingData

EFFECTIVE = 16
NORM_BATCH = 2
EXACT = 1e-12

ERRORS = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host": MemoryError(),
    "allocator": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    "driver": RuntimeError("CUDA error: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


class Cramped(Wrapped):
    """Memory for `rows` samples at a time. It runs out after the forward pass of the second micro-batch."""

    def __init__(self, task: Task, *, rows: int, error: Exception) -> None:
        super().__init__(task)
        self.rows, self.error, self.forwards, self.failures = rows, error, 0, 0

    def training(self, forward: Forward, batch: Batch) -> Sums:
        sums = super().training(forward, batch)
        self.forwards += 1
        if len(batch.targets) > self.rows and self.forwards % 2 == 0:
            self.failures += 1
            raise self.error
        return sums


def data_of(config: Config) -> TrainingData:
    shape = (3, 8, 8) if config.model == "resnet18" else (1, 28, 28)
    return random_data(config, shape=shape, train_size=40, test_size=10)


def cramped_job(
    plan: Plan, *, rows: int, error: Exception | None = None, model: str = "lenet5", **changes: object
) -> Job:
    config = small_config(model, **changes)

    def cramped(task: Task) -> Task:
        return Cramped(task, rows=rows, error=error or ERRORS["device"])

    return small_job(config, plan, data_of(config), record=MemoryRecord(), task=cramped)


def record_of(job: Job) -> MemoryRecord:
    assert isinstance(job.record, MemoryRecord)
    return job.record


@pytest.mark.slow
@pytest.mark.parametrize("kind", ERRORS)
def test_training_goes_on_in_smaller_pieces_to_the_same_weights(kind: str) -> None:
    job = cramped_job(small_plan(8, 8), rows=2, error=ERRORS[kind])
    state = trained(job)
    assert isinstance(job.task, Cramped) and job.task.failures == 2
    assert job.plan.micro_batches == (2,) * 8 and job.plan.effective_batch == EFFECTIVE
    assert [plan.micro_batch for plan in record_of(job).plans] == [4, 2]
    assert "out of memory at micro-batch 8: continuing with 4" in record_of(job).said
    small = small_job(job.config, small_plan(*(2,) * 8), data_of(job.config))
    assert largest_difference(state, trained(small)) <= EXACT


def test_the_optimizer_is_asked_once_for_every_step() -> None:
    job = cramped_job(small_plan(8, 8), rows=4)
    updates: list[int] = []
    job.optimizer.register_step_post_hook(lambda *_: updates.append(1))
    train(job, Progress())
    (row,) = record_of(job).of_kind("train")
    assert len(updates) == 3 and row["step"] == 3
    assert row["micro_batch"] == 4 and row["epoch"] == 3 * EFFECTIVE / 40


def test_samples_of_an_abandoned_step_are_not_counted_twice() -> None:
    steady = small_job(small_config(), small_plan(4, 4, 4, 4), data_of(small_config()), record=MemoryRecord())
    cramped = cramped_job(small_plan(8, 8), rows=4)
    train(steady, Progress())
    train(cramped, Progress())
    (expected,), (row,) = record_of(steady).of_kind("train"), record_of(cramped).of_kind("train")
    assert row["loss"] == pytest.approx(expected["loss"], rel=EXACT)


def ghost_state(*, discard: bool, monkeypatch: pytest.MonkeyPatch) -> float:
    """Largest difference of the running statistics from those of a run that began with small pieces."""
    if not discard:
        monkeypatch.setattr("train.loop.discard_statistics", lambda _: None)
    changes = {"model": "resnet18", "norm_batch": NORM_BATCH}
    # Memory runs out in the second of three: groups that were all counted twice would have the same mean.
    job = cramped_job(small_plan(8, 8, 8, norm_batch=NORM_BATCH), rows=4, **changes)  # type: ignore[arg-type]
    small = small_job(job.config, small_plan(*(4,) * 6, norm_batch=NORM_BATCH), data_of(job.config))
    one, other = trained(job), trained(small)
    assert isinstance(job.task, Cramped) and job.task.failures >= 1
    assert largest_difference(one, other, only="weight") <= EXACT
    return largest_difference(one, other, only="running_")


@pytest.mark.slow
def test_statistics_of_an_abandoned_step_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ghost_state(discard=True, monkeypatch=monkeypatch) <= EXACT


@pytest.mark.slow
def test_without_discarding_them_the_running_statistics_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ghost_state(discard=False, monkeypatch=monkeypatch) > 1e-4


@pytest.mark.slow
def test_pieces_stay_multiples_of_the_batch_of_normalisation() -> None:
    plan = small_plan(8, 8, norm_batch=8)
    job = cramped_job(plan, rows=4, model="resnet18", norm_batch=8)
    with pytest.raises(ToolkitError, match="out of memory at micro-batch 8, and there is no smaller one"):
        train(job, Progress())
    assert job.plan == plan and not record_of(job).plans


def test_one_sample_that_does_not_fit_is_one_line() -> None:
    job = cramped_job(small_plan(2, 2), rows=0)
    with pytest.raises(ToolkitError, match=r"micro-batch 1, and there is no smaller one: CUDA out of memory"):
        train(job, Progress())
    assert [plan.micro_batch for plan in record_of(job).plans] == [1]


def test_what_only_may_be_a_lack_of_memory_is_told_in_its_own_words() -> None:
    error = RuntimeError(
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Perhaps the input is not contiguous.\nMore"
    )
    job = cramped_job(small_plan(2, 2), rows=0, error=error)
    with pytest.raises(
        ToolkitError, match=r": cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\. Perhaps.*contiguous\."
    ):
        train(job, Progress())


def test_an_uneven_step_is_cut_again_into_even_pieces() -> None:
    job = cramped_job(small_plan(6, 6, 4), rows=4)
    train(job, Progress())
    assert job.plan.micro_batches == (4, 4, 4, 4)


def test_oom_retry_off_stops_at_the_first_time() -> None:
    job = cramped_job(small_plan(8, 8), rows=4, oom_retry=False)
    with pytest.raises(ToolkitError, match="set CONFIG_HYPER_PARAM_MANUAL=y CONFIG_BATCH_SIZE=4"):
        train(job, Progress())
    assert not record_of(job).plans and not record_of(job).saved


def test_one_rank_of_several_cannot_retry_alone() -> None:
    backend, config = FakeBackend(rank=1, world=2), small_config()

    def cramped(task: Task) -> Task:
        return Cramped(task, rows=4, error=ERRORS["device"])

    job = small_job(config, small_plan(8, 8, world=2), data_of(config), backend=backend, task=cramped)
    with pytest.raises(ToolkitError, match="on one of several devices"):
        train(job, Progress())


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory")])
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)
    job = cramped_job(small_plan(8, 8), rows=4, error=error)
    with pytest.raises(type(error), match=str(error)):
        train(job, Progress())
    assert not record_of(job).plans


def after_updating(step: Callable[..., object]) -> Callable[..., object]:
    def failing(*arguments: object, **options: object) -> object:
        step(*arguments, **options)
        raise ERRORS["device"]

    return failing


def test_an_update_that_ran_out_of_memory_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    job = cramped_job(small_plan(8, 8), rows=8)
    monkeypatch.setattr(job.optimizer, "step", after_updating(job.optimizer.step))
    with pytest.raises(ToolkitError, match="while the weights were being updated: CUDA out of memory"):
        train(job, Progress())
    assert not record_of(job).plans


def test_gradients_are_given_back_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    job = cramped_job(small_plan(8, 8), rows=4)
    kept: list[bool] = []

    def release(_: Backend) -> None:
        kept.append(any(parameter.grad is not None for parameter in job.model.parameters()))

    monkeypatch.setattr(Backend, "release_memory", release)
    train(job, Progress())
    assert kept == [False]
