"""Puzzles that are changed before training: the same run, and room for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.plan.types import Device
from tests.models.trm.puzzles import puzzle_data, small_trm_config
from tests.support.training import CPU, MemoryRecord, small_plan
from tests.train.test_initial_weights import ROOT, an_order, refuse_directories
from train import commands
from train.build import make_job
from train.job import Job, Progress
from train.loop import train
from train.planning import run_plan as orders

STEPS, BATCH, TRAIN = 10, 12, 48  # two and a half epochs


def job_of(*, ahead: bool, whole_run: bool = True, record: MemoryRecord | None = None) -> Job:
    options: dict[str, Any] = {"augment": "symmetries", "augment_ahead": ahead, "max_steps": STEPS}
    config = small_trm_config(**options)
    return make_job(
        config,
        small_plan(BATCH // 2, BATCH // 2),
        puzzle_data(config, train=TRAIN),
        hardware=CPU,
        backend=Backend("cpu"),
        record=record or MemoryRecord(),
        whole_run=whole_run,
    )


@pytest.mark.slow
def test_the_run_is_the_same_to_the_bit() -> None:
    states, record = [], MemoryRecord()
    for ahead in (False, True):
        job = job_of(ahead=ahead, record=record)
        with job.train_loader, job.eval_loader:
            train(job, Progress())
        states.append(job.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    said = [line for line in record.said if "ahead" in line]
    assert said[0].endswith("stream: puzzles are augmented ahead, in main memory")
    # 3 epochs of 48 puzzles and as many solutions of 16 cells.
    assert said[1:] == ["Puzzles of 3 epochs are augmented ahead: 0.0 MB for each process"]


@pytest.mark.slow
def test_only_a_whole_run_has_them_changed_ahead() -> None:
    record = MemoryRecord()
    job = job_of(ahead=True, whole_run=False, record=record)
    with job.train_loader, job.eval_loader:
        batches = job.train_loader.micro_batches(step=STEPS, target=BATCH, sizes=(BATCH,))
        assert len(next(batches).inputs) == BATCH, "a step that the run would not make"
    assert not [line for line in record.said if line.startswith("Puzzles")]


@pytest.mark.slow
def test_without_room_it_is_refused_and_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 2 * 3 * TRAIN * 16

    def free(bytes_: int) -> None:
        device = Device(name="main memory", total_bytes=10**9, free_bytes=bytes_)
        monkeypatch.setattr("train.build.main_memory", lambda _: device)

    free(4 * wanted)
    with job_of(ahead=True).train_loader:
        pass
    free(4 * wanted - 4)
    with pytest.raises(ConfigError, match=r"AUGMENT_AHEAD=y takes .* more than a quarter .*AUGMENT_AHEAD=n"):
        job_of(ahead=True)


def test_puzzles_that_have_no_room_are_refused_before_there_is_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_trm_config(augment="symmetries", augment_ahead=True, max_steps=10**9, warmup_pct=0)
    monkeypatch.setattr(orders, "apply_hyperparams", lambda *_, **__: small_plan(6, 6))
    monkeypatch.setattr(commands, "open_to_train", lambda *_, **__: puzzle_data(config))
    refuse_directories(monkeypatch)
    with pytest.raises(ConfigError, match=r"CONFIG_AUGMENT_AHEAD=y takes .* GB of main memory"):
        commands._plan_and_train(an_order(config, ROOT))
