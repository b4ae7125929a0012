"""The course of a run: what is done when, and when it ends."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from lib.data.loader import Batch
from lib.devices.base import Backend
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
from train.job import Job, Progress, early_stop
from train.loop import load_state_dict, state_dict, train
from train.signals import Stopped
from train.tasks.base import Forward, Sums, Task

TRAIN_SIZE, EFFECTIVE = 40, 16  # 2.5 steps to an epoch


class Slow(Backend):
    """A device whose work is waited for where numbers are read, not where it is ordered."""

    def __init__(self, clock: Clock, *, wait: float) -> None:
        super().__init__("cpu")
        self.clock, self.wait = clock, wait

    def all_reduce_sum(self, tensor: Tensor) -> None:  # noqa: ARG002
        self.clock.now += self.wait


def job_of(
    backend: Backend | None = None, task: Any = lambda task: task, **changes: Any
) -> tuple[Job, MemoryRecord]:
    record, config = MemoryRecord(), small_config(**changes)
    data = random_data(config, shape=(1, 28, 28), train_size=TRAIN_SIZE, test_size=9)
    return small_job(config, small_plan(EFFECTIVE), data, backend=backend, record=record, task=task), record


def steps_of(record: MemoryRecord, kind: str) -> list[int]:
    return [row["step"] for row in record.of_kind(kind)]


# What is done when


def test_an_epoch_is_evaluated_once_wherever_its_end_falls_and_so_is_the_last_step() -> None:
    job, record = job_of(max_steps=9, log_interval_steps=100, keep_best=False)
    train(job, Progress())
    assert steps_of(record, "eval") == [3, 5, 8, 9]
    assert [row["epoch"] for row in record.of_kind("eval")] == [1.2, 2.0, 3.2, 3.6]
    assert steps_of(record, "train") == [3, 5, 8, 9], "an evaluation comes with a row of training"
    assert [step for step, _ in record.saved] == [9]


def test_a_step_of_many_epochs_is_evaluated_once() -> None:
    config = small_config(max_steps=2)
    data = random_data(config, shape=(1, 28, 28), train_size=5, test_size=9)
    record = MemoryRecord()
    train(small_job(config, small_plan(16), data, record=record), Progress())
    assert steps_of(record, "eval") == [1, 2]


def test_intervals_are_kept_and_every_checkpoint_comes_with_a_row() -> None:
    intervals: dict[str, Any] = {
        "log_interval_steps": 4,
        "eval_interval_steps": 5,
        "checkpoint_interval_steps": 3,
    }
    job, record = job_of(max_steps=11, keep_best=False, **intervals)
    train(job, Progress())
    assert steps_of(record, "eval") == [5, 10, 11]
    assert [step for step, _ in record.saved] == [3, 6, 9, 11]
    assert steps_of(record, "train") == [3, 4, 5, 6, 8, 9, 10, 11]
    assert record.fractions == [step / 11 for step in range(1, 12)]


def test_rows_share_out_the_samples_between_them() -> None:
    """Every row is the mean over the steps since the one before."""
    changes: dict[str, Any] = {"max_steps": 6, "eval_interval_steps": 6}
    job, record = job_of(log_interval_steps=3, **changes)
    single, singles = job_of(log_interval_steps=1, **changes)
    train(job, Progress())
    train(single, Progress())
    losses = [row["loss"] for row in singles.of_kind("train")]
    expected = [sum(losses[:3]) / 3, sum(losses[3:]) / 3]
    assert [row["loss"] for row in record.of_kind("train")] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("least", "expected"), [(0, [2, 4, 6, 8, 10, 12]), (5, [6, 12]), (3600, [12])])
def test_rows_are_at_least_so_many_seconds_apart(
    least: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, intervals = Clock(monkeypatch), {"log_interval_steps": 2, "eval_interval_steps": 1000}
    job, record = job_of(max_steps=12, log_seconds=least, **intervals)
    job.task = Timed(job.task, clock, step=1.0)
    train(job, Progress())
    assert steps_of(record, "train") == expected


def test_the_best_is_the_largest_metric_and_is_saved_at_once() -> None:
    accuracies = iter([0.25, 0.5, 0.5, 0.375, 0.625])

    class Scripted(Wrapped):
        def evaluation(self, forward: Forward, batch: Batch) -> Sums:
            sums = super().evaluation(forward, batch)
            return Sums(sums.loss, sums.count, {"accuracy": sums.loss.new_tensor(next(accuracies) * 9)})

    job, record = job_of(task=Scripted, max_steps=5, eval_interval_steps=1)
    progress = Progress()
    train(job, progress)
    assert record.saved == [(1, True), (2, True), (5, True)]
    assert progress.best == pytest.approx(0.625)
    assert [state["progress"]["best"] for state in record.states.values()] == [0.25, 0.5, 0.625]


def test_checkpoints_by_time_count_from_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    job, record = job_of(
        task=lambda task: Timed(task, clock, step=7),
        max_steps=9,
        checkpoint_seconds=20,
        eval_interval_steps=100,
    )
    train(job, Progress())
    assert [step for step, _ in record.saved] == [3, 6, 9]


def test_an_evaluation_keeps_nothing_for_a_backward_pass() -> None:
    class Asking(Wrapped):
        def evaluation(self, forward: Forward, batch: Batch) -> Sums:
            sums = super().evaluation(forward, batch)
            assert not sums.loss.requires_grad
            return sums

    job, record = job_of(task=Asking)
    train(job, Progress())
    assert steps_of(record, "eval") == [3]


# A budget of seconds


def test_seconds_are_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    task: list[Timed] = []

    def timed(inner: Task) -> Task:
        task.append(Timed(inner, clock, step=1, evaluation=1000))
        return task[0]

    job, record = job_of(task=timed, budget="seconds", max_seconds=10, eval_interval_steps=4)
    progress = Progress()
    result = train(job, progress)
    assert (progress.step, progress.seconds) == (10, 10.0) and task[0].trained == 10
    assert steps_of(record, "eval") == [4, 8, 10] and result["samples"] == 9
    assert record.fractions == [step / 10 for step in range(1, 11)]


def test_a_budget_of_seconds_makes_at_least_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    job, record = job_of(
        task=lambda task: Timed(task, clock, step=100), budget="seconds", max_seconds=1, max_steps=None
    )
    progress = Progress()
    assert train(job, progress)["samples"] == 9
    assert progress.step == 1 and [step for step, _ in record.saved] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("wait", [2.0, 4.5, 9.5, 50.0])
def test_a_budget_that_ends_in_waiting_for_the_device_ends_well(
    wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    intervals = {"log_interval_steps": 2, "eval_interval_steps": 1000}
    job, record = job_of(
        Slow(clock, wait=wait),
        lambda task: Timed(task, clock, step=0.25),
        budget="seconds",
        max_seconds=10,
        **intervals,
    )
    progress = Progress()
    assert train(job, progress)["samples"] == 9
    assert steps_of(record, "eval") == [progress.step] == [record.saved[-1][0]]
    rows = record.of_kind("train")
    assert progress.seconds == rows[-1]["seconds"] == progress.step * 0.25 + len(rows) * wait


def test_samples_per_second_include_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    job, record = job_of(
        Slow(clock, wait=3.0),
        lambda task: Timed(task, clock, step=0.5, evaluation=1000),
        max_steps=6,
        log_interval_steps=2,
        eval_interval_steps=4,
    )
    train(job, Progress())
    rates = [row["samples_per_second"] for row in record.of_kind("train")]
    assert rates == [2 * EFFECTIVE / 4.0] * 3


# Requests to stop


def test_a_signal_is_granted_at_the_end_of_the_step_with_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    handler = signal.getsignal(signal.SIGTERM)
    job, record = job_of(
        task=lambda task: Timed(task, clock, step=1, signal_at=1),
        max_steps=9,
        log_interval_steps=100,
        eval_interval_steps=100,
    )
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 2; make resume") as stopped:
        train(job, Progress())
    assert stopped.value.step == 2 and stopped.value.exit_code == 75
    assert [step for step, _ in record.saved] == [2] == steps_of(record, "train")
    assert not record.of_kind("eval")
    assert signal.getsignal(signal.SIGTERM) is handler


class Interrupted(Wrapped):
    """A signal comes in the middle of an evaluation."""

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluation(forward, batch)


def of_steps(record: MemoryRecord, kind: str) -> list[dict[str, Any]]:
    """Rows without what differs between any two runs."""
    times = {"seconds", "samples_per_second", "data_wait"}
    return [{name: value for name, value in row.items() if name not in times} for row in record.of_kind(kind)]


@pytest.mark.slow
@pytest.mark.parametrize("max_steps", [2, 3], ids=["of the last step", "of another step"])
def test_an_evaluation_that_a_signal_cuts_short_is_made_when_the_run_goes_on(max_steps: int) -> None:
    changes = {"max_steps": max_steps, "eval_interval_steps": 2, "ema": True, "ema_decay": 0.9}
    whole, expected = job_of(**changes)
    result = train(whole, Progress())
    job, record = job_of(task=Interrupted, **changes)
    with pytest.raises(Stopped, match="after step 2"):
        train(job, Progress())
    assert job.model.training and not record.of_kind("eval")
    ((step, state),) = record.states.items()
    assert step == 2
    again, later = job_of(**changes)
    progress = load_state_dict(again, state)
    assert progress.evaluation_pending
    assert train(again, progress) == result
    assert of_steps(later, "eval") == of_steps(expected, "eval") and not progress.evaluation_pending
    assert progress.best == max(job.task.score(row) for row in of_steps(expected, "eval"))
    again, later = job_of(**changes)
    progress = load_state_dict(again, state)
    progress.best = math.inf
    train(again, progress)
    assert later.saved[0] == (2, False), "a kill must not leave the row to be written again"


def test_a_signal_in_the_last_step_leaves_only_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    job, record = job_of(task=lambda task: Timed(task, clock, step=1, signal_at=2))
    with pytest.raises(Stopped, match="after step 3"):
        train(job, Progress())
    ((step, state),) = record.states.items()
    assert step == 3
    again, later = job_of()
    assert train(again, load_state_dict(again, state))["samples"] == 9
    assert steps_of(later, "eval") == [3] and not steps_of(later, "train")


def test_a_checkpoint_with_former_names_of_fields_is_resumed() -> None:
    job, _ = job_of()
    state = state_dict(job, Progress(step=3, evaluation_pending=True))
    state["progress"]["owes_evaluation"] = state["progress"].pop("evaluation_pending")
    assert load_state_dict(job, state) == Progress(step=3, evaluation_pending=True)


class Losses(Wrapped):
    """A task whose evaluations have these losses, with the accuracy 1 - loss."""

    left: Iterator[float]

    def report(self, means: Any) -> dict[str, float]:
        loss = next(self.left)
        return {"samples": means["count"], "loss": loss, "accuracy": 1 - loss}


def with_losses(*losses: float) -> Any:
    def wrapped(task: Task) -> Losses:
        made = Losses(task)
        made.left = iter(losses)
        return made

    return wrapped


COURSE = (0.9, 0.5, 0.45, 0.42, 0.6, 0.3, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({"early_stop_evals": 0}, 7),
        ({"early_stop_evals": 1}, 5),  # 0.6 is the first that is no better
        ({"early_stop_evals": 2}, 7),
        ({"early_stop_evals": 2, "early_stop_delta": 0.1}, 4),  # after 0.5 neither by more than 0.1
        ({"early_stop_evals": 3, "early_stop_delta": 0.1}, 5),
        ({"early_stop_evals": 1, "best_metric": "loss"}, 5),
        ({"early_stop_evals": 1, "best_metric": "accuracy", "early_stop_delta": 0.3}, 3),
    ],
)
def test_a_run_that_gets_no_better_ends(options: dict[str, Any], ends: int) -> None:
    changes = {"max_steps": 7, "eval_interval_steps": 1, **options}
    job, record = job_of(task=with_losses(*COURSE), **changes)
    progress = Progress()
    result = train(job, progress)
    assert progress.step == ends and result["loss"] == COURSE[ends - 1]
    assert record.saved[-1][0] == ends and bool(early_stop(job, progress)) == (ends < 7)
    expected = f"stopped early at step {ends}: no better {options.get('best_metric', 'score')}"
    assert early_stop(job, progress).startswith(expected if ends < 7 else "")
    assert progress.best == pytest.approx(
        -min(COURSE[:ends]) if options.get("best_metric") == "loss" else 1 - min(COURSE[:ends])
    )


def test_patience_survives_a_resume() -> None:
    """Stopped after the first of two evaluations that are no better, the resumed run ends at the second."""
    changes = {
        "max_steps": 9,
        "eval_interval_steps": 1,
        "checkpoint_interval_steps": 1,
        "early_stop_evals": 2,
    }
    job, record = job_of(task=with_losses(0.5, 0.6, 0.55, 0.1), **changes)
    progress = Progress()
    train(job, progress)
    assert progress.step == 3
    again, later = job_of(task=with_losses(0.55, 0.1), **changes)
    resumed = load_state_dict(again, record.states[2])
    assert (resumed.stale_evals, resumed.best_to_beat) == (1, 0.5)
    train(again, resumed)
    assert resumed.step == 3 and later.saved == [(3, False)]
    done, _ = job_of(task=with_losses(0.55), **changes)
    assert train(done, load_state_dict(done, record.states[3]))["loss"] == 0.55, "it is over already"


def test_what_is_not_a_number_is_never_better() -> None:
    changes = {"max_steps": 9, "eval_interval_steps": 1, "early_stop_evals": 2, "best_metric": "loss"}
    job, _ = job_of(task=with_losses(float("nan"), float("nan"), 0.1), **changes)
    progress = Progress()
    train(job, progress)
    assert progress.step == 2 and progress.best == -float("inf")
