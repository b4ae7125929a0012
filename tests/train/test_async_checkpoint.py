"""A checkpoint that is written beside training is the one that training would have waited for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.distributed.fsdp import Gatherer, snapshot
from lib.errors import CheckpointError, ToolkitError
from lib.runs import checkpoint
from lib.runs.console import Console
from lib.runs.directory import RunDir
from tests.e2e.sharded_worker import digest
from tests.lib.runs.test_checkpoint_kill import die_before_change, ignore
from tests.support.training import (
    Clock,
    MemoryRecord,
    Timed,
    random_data,
    small_config,
    small_job,
    small_plan,
)
from train.job import Job, Progress
from train.loop import load_state_dict, state_dict, train
from train.record import AsyncCheckpointer, Record, RunRecord
from train.signals import Stopped

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60
STEPS, EVERY = 8, 3
ALONE = Gatherer(rank=0)


def job_of(record: Record, *, aside: bool, **changes: Any) -> Job:
    settings = {"max_steps": STEPS, "checkpoint_interval_steps": EVERY, "ema": True, "ema_decay": 0.5}
    config = small_config(checkpoint_async=aside, eval_interval_steps=100, **settings | changes)
    data = random_data(config, shape=(1, 28, 28), train_size=24, test_size=5)
    return small_job(config, small_plan(4, 4), data, record=record)


def without_seconds(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "progress": {**state["progress"], "seconds": None}}


class Late(MemoryRecord):
    """Looks at what it is to keep only when training is two steps further, or is at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.made = {step: threading.Event() for step in range(1, STEPS + 1)}
        self.threads: set[str] = set()

    def progress(self, step: int, fraction: float) -> None:
        super().progress(step, fraction)
        self.made[step].set()

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:
        self.threads.add(threading.current_thread().name)
        assert self.made[min(step + 2, STEPS)].wait(PATIENCE_SECONDS)
        super().save(step, state, best=best)


def test_what_is_kept_later_is_the_state_of_its_step() -> None:
    at_once, late = MemoryRecord(), Late()
    train(job_of(at_once, aside=False), Progress())
    train(job_of(late, aside=True), Progress())
    assert late.saved == at_once.saved and [step for step, _ in late.saved][:2] == [3, 6]
    for step, state in at_once.states.items():
        assert digest(without_seconds(late.states[step])) == digest(without_seconds(state)), step
    assert late.threads == {"checkpoint_0"}, "training has not waited"
    assert len({digest(state["model"]) for state in late.states.values()}) == len(late.states)


@pytest.mark.slow
def test_a_run_goes_on_from_it_to_the_same_bits(tmp_path: Path) -> None:
    digests, found = {}, {}
    for aside in (False, True):
        run = RunDir.create(tmp_path / str(aside), model="lenet5", identity="0" * 8, files={"config": ""})
        record = RunRecord(run, Console(run.log), started=0.0, keep_last=3)
        record.begin(0, STEPS)
        train(job := job_of(record, aside=aside), progress := Progress())
        record.close()
        digests[aside] = digest(without_seconds(state_dict(job, progress)))
        loaded = checkpoint.load(run.checkpoints, which=EVERY, log=print)
        assert loaded is not None
        found[aside] = loaded[1]
    assert digest(without_seconds(found[True])) == digest(without_seconds(found[False]))
    resumed = job_of(Record(), aside=True)
    progress = load_state_dict(resumed, found[True])
    assert progress.step == EVERY
    train(resumed, progress)
    assert digest(without_seconds(state_dict(resumed, progress))) == digests[True] == digests[False]


class Slow(MemoryRecord):
    """Notices if it is asked to keep two states at once, and gives training every chance to ask for that."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = threading.Lock()

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:
        assert self.busy.acquire(blocking=False)
        threading.Event().wait(0.05)
        super().save(step, state, best=best)
        self.busy.release()


@pytest.mark.slow
def test_one_is_kept_at_a_time_and_the_end_waits_for_the_last() -> None:
    record = Slow()
    train(job_of(record, aside=True, checkpoint_interval_steps=1), Progress())
    assert [step for step, _ in record.saved] == list(range(1, STEPS + 1))


def test_a_signal_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Slow()
    job = job_of(record, aside=True)
    job.task = Timed(job.task, Clock(monkeypatch), step=1.0, signal_at=3)
    with pytest.raises(Stopped, match="after step 2"):
        train(job, Progress())
    assert record.saved == [(2, False)]


class Full(Record):
    """There is no room on the disk from some step on."""

    def __init__(self, *, from_step: int) -> None:
        self.from_step, self.said = from_step, list[str]()

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:  # noqa: ARG002
        if step >= self.from_step:
            raise CheckpointError(f"no room for step {step}")

    def log(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6, STEPS])
def test_what_goes_wrong_ends_the_run(step: int) -> None:
    with pytest.raises(CheckpointError, match=f"no room for step {step}"):
        train(job_of(Full(from_step=step), aside=True), Progress())


def test_what_went_wrong_is_raised_at_the_next_boundary() -> None:
    with (
        pytest.raises(CheckpointError, match="step 1"),
        AsyncCheckpointer(Full(from_step=1), asynchronous=True) as saver,
    ):
        saver.check()
        saver.save(1, {}, ALONE, best=False)
        pending = saver._pending
        assert pending is not None
        wait([pending], timeout=PATIENCE_SECONDS)
        saver.check()
        raise AssertionError("the run went on")


def test_the_next_one_raises_what_went_wrong_before() -> None:
    with (
        pytest.raises(CheckpointError, match="step 1"),
        AsyncCheckpointer(Full(from_step=1), asynchronous=True) as saver,
    ):
        saver.save(1, {}, ALONE, best=False)
        saver.save(2, {}, ALONE, best=False)


def test_of_two_errors_the_one_that_ended_the_run_is_raised_and_both_are_told() -> None:
    record = Full(from_step=1)
    with pytest.raises(ToolkitError, match="diverged"), AsyncCheckpointer(record, asynchronous=True) as saver:
        saver.save(1, {}, ALONE, best=False)
        raise ToolkitError("training has diverged")
    assert record.said == ["The last checkpoint was not kept: no room for step 1"]
    with pytest.raises(CheckpointError), AsyncCheckpointer(record, asynchronous=True) as saver:
        saver.save(1, {}, ALONE, best=False)
        raise Stopped(15, 1)


def test_a_snapshot_shares_no_memory_but_keeps_what_was_tied() -> None:
    weight = torch.arange(6.0).view(2, 3).t()
    state = {"a": weight, "list": [weight.view_as(weight), {"rate": 0.1}], "empty": torch.empty(0)}
    copied = snapshot(state, replicated=True)
    kept = weight.clone()
    weight.zero_()
    assert torch.equal(copied["a"], kept) and copied["a"].stride() == weight.stride()
    assert copied["a"].data_ptr() == copied["list"][0].data_ptr() != weight.data_ptr()
    assert copied["list"][1] == {"rate": 0.1} and isinstance(copied["empty"], Tensor)
    assert snapshot(state, replicated=False) == {"a": None, "list": [None, {"rate": 0.1}], "empty": None}


def kill_beside_training(directory: Path) -> None:
    """Die before every fifth change of the file system, by training or by the writer; then resume."""
    torch.set_num_threads(1)
    os.fsync = ignore  # a killed process loses nothing that it wrote

    def record_in(folder: Path) -> RunRecord:
        run = RunDir.create(folder, model="lenet5", identity="0" * 8, files={"config": ""})
        return RunRecord(run, Console(run.log), started=0.0, keep_last=2)

    def weights(job: Job, progress: Progress) -> str:
        train(job, progress)
        return digest(job.model.state_dict())

    whole = weights(job_of(Record(), aside=True), Progress())
    steps, status = list[int](), -1
    for point in range(0, 1000, 5):
        record = record_in(directory / str(point))
        child = os.fork()
        if child == 0:
            record.begin(0, STEPS)
            die_before_change(point)
            train(job_of(record, aside=True, checkpoint_interval_steps=1), Progress())
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        found = (
            checkpoint.load(record.run.checkpoints, log=print) if record.run.checkpoints.exists() else None
        )
        job = job_of(Record(), aside=True)
        progress = Progress() if found is None else load_state_dict(job, found[1])
        steps.append(progress.step)
        assert weights(job, progress) == whole, (point, progress.step)
        if status == 0:
            break
    assert status == 0 and steps[-1] == STEPS and len({*steps}) > 3, steps
    print(json.dumps(steps))


@pytest.mark.long
def test_a_run_that_is_killed_while_it_is_written_resumes_to_the_same_bits(tmp_path: Path) -> None:
    place = f"t.kill_beside_training(t.Path({str(tmp_path)!r}))"
    code = f"from tests.train import test_async_checkpoint as t; {place}"
    single = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork copies one thread
    options: dict[str, Any] = {"cwd": ROOT, "env": single, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", code], **options, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])[0] == 0
