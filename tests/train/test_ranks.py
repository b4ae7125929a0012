"""All ranks enter the same collectives in the same order: one that does not would wait for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from lib.data.loader import Batch
from tests.support.fake_backend import FakeBackend
from tests.support.training import (
    Clock,
    MemoryRecord,
    Timed,
    Wrapped,
    random_data,
    small_config,
    small_job,
    small_plan,
)
from train.job import Progress
from train.loop import optimizer_step, train
from train.signals import Stopped
from train.tasks.base import Forward, Sums

WORLD = 4


class Rank(FakeBackend):
    """One of several ranks; waiting for the device takes each another time."""

    clock: Clock

    def all_reduce_sum(self, tensor: Tensor) -> None:
        super().all_reduce_sum(tensor)
        self.clock.now += 0.5 * (self.rank + 1)


class Leader(Rank):
    """The rank whose clock runs fastest: its numbers are the maxima. They are kept for the others."""

    def __init__(self, *, rank: int, world: int) -> None:
        super().__init__(rank=rank, world=world)
        self.maxima: list[list[float]] = []

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        self.maxima.append(super().all_reduce_max(values))
        return self.maxima[-1]


class Follower(Rank):
    """A rank with a slower clock, which is told the maxima."""

    def __init__(self, maxima: list[list[float]], *, rank: int, world: int) -> None:
        super().__init__(rank=rank, world=world)
        self.maxima = list(maxima)

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        own, maxima = super().all_reduce_max(values), self.maxima.pop(0)
        assert all(value <= maximum + 1e-9 for value, maximum in zip(own, maxima, strict=True))
        return maxima


COURSES: dict[str, dict[str, Any]] = {
    "steps": {"max_steps": 7, "log_interval_steps": 2, "eval_interval_steps": 3},
    "checkpoints by time": {"max_steps": 12, "checkpoint_seconds": 10, "eval_interval_steps": 100},
    "seconds": {"budget": "seconds", "max_seconds": 30, "log_interval_steps": 2},
    "signal": {"max_steps": 12, "eval_interval_steps": 100},
}


def course(backend: Rank, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[list[str], list[float]]:
    """The collectives that a rank enters and the learning rates it uses; the higher its rank, the slower."""
    backend.clock = clock = Clock(monkeypatch)
    signal_at = 4 if name == "signal" and isinstance(backend, Leader) else -1
    config = small_config(schedule="cosine", lr_min_ratio=0.0, grad_clip=1.0, **COURSES[name])
    job = small_job(
        config,
        small_plan(4, world=WORLD),
        # No rank sees padding alone.
        random_data(config, shape=(1, 28, 28), train_size=40, test_size=4 * WORLD + 1),
        backend=backend,
        record=(record := MemoryRecord()),
        task=lambda task: Timed(task, clock, step=3.1 + backend.rank, evaluation=1, signal_at=signal_at),
    )
    rates: list[float] = []
    job.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    if name == "signal":
        with pytest.raises(Stopped, match="after step 6"):
            train(job, Progress())
    else:
        train(job, Progress())
    assert record.saved, "a rank decides on a checkpoint before it is known who writes it"
    return backend.calls, rates


@pytest.mark.slow
@pytest.mark.parametrize("name", COURSES)
def test_all_ranks_enter_the_same_collectives_whatever_their_clocks_say(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = Leader(rank=WORLD - 1, world=WORLD)
    expected = course(leader, monkeypatch, name)
    assert len(expected[0]) > 6 and len(set(expected[1])) > 3
    for rank in range(WORLD - 1):
        follower = Follower(leader.maxima, rank=rank, world=WORLD)
        assert course(follower, monkeypatch, name) == expected
        assert not follower.maxima


class Waits(FakeBackend):
    """A rank that notes after how many steps it begins to reduce, and waits for, what the ranks agree on."""

    def __init__(self) -> None:
        super().__init__(rank=0, world=WORLD)
        self.task: Timed | None = None
        self.begun: list[int] = []
        self.waited: list[int] = []

    def begin_all_reduce_max(self, values: Sequence[float]) -> Callable[[], list[float]]:
        assert self.task is not None
        self.begun.append(self.task.trained)

        def result() -> list[float]:
            assert self.task is not None
            self.waited.append(self.task.trained)
            return list(values)

        return result


def test_no_rank_waits_for_what_another_says_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a row of metrics, here after steps 4 and 7, waits for the device."""
    clock, backend = Clock(monkeypatch), Waits()
    settings = {"max_steps": 7, "log_interval_steps": 4, "eval_interval_steps": 4}
    config = small_config(**settings)
    data = random_data(config, shape=(1, 28, 28), train_size=40, test_size=4 * WORLD)
    job = small_job(config, small_plan(4, world=WORLD), data, backend=backend)
    job.task = backend.task = Timed(job.task, clock, step=1.0, evaluation=100.0)
    train(job, progress := Progress())
    assert backend.begun == [1, 2, 3, 4, 5, 6, 7]
    assert backend.waited == [2, 3, 4, 4, 6, 7, 7]
    assert progress.seconds == 7, "an evaluation is no training"


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_all_ranks_reduce_the_count_where_one_has_padding(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the ranks with padding get weights, and with them a count on the device."""
    monkeypatch.setattr("lib.nn.compile.compiled_forward", lambda _, wrapped, **__: wrapped)  # takes minutes
    plan = small_plan(1, 1, world=WORLD, effective_batch=7, compile=compiled)
    assert plan.is_padded and plan.micro_batches_of(WORLD - 1) == ((1, 1), (1, 0))
    calls = []
    for rank in range(WORLD):
        config = small_config(max_steps=1, log_interval_steps=100)
        data = random_data(config, shape=(1, 28, 28), train_size=40, test_size=9)
        backend = FakeBackend(rank=rank, world=WORLD)
        optimizer_step(small_job(config, plan, data, backend=backend), Progress())
        calls.append(backend.calls)
    assert calls == [["sum()"]] * WORLD


@pytest.mark.slow
def test_ghost_statistics_and_counts_are_one_collective_each() -> None:
    class Counted(Wrapped):
        def training(self, forward: Forward, batch: Batch) -> Sums:
            sums = super().training(forward, batch)
            return Sums(sums.loss, sums.loss.new_tensor(len(batch.targets)), sums.metrics)

    config = small_config("resnet18", norm_batch=2, max_steps=1)
    data = random_data(config, shape=(3, 8, 8), train_size=40, test_size=9)
    backend = FakeBackend(rank=2, world=WORLD)
    job = small_job(config, small_plan(2, 2, world=WORLD, norm_batch=2), data, backend=backend, task=Counted)
    train(job, Progress())
    channels = sum(
        module.num_features for module in job.model.modules() if isinstance(module, nn.BatchNorm2d)
    )
    step = ["sum()", f"sum({3 * channels},)"]
    assert backend.calls == [*step, "sum(3,)", "max(4)", "max(1)", "sum(3,)"]
