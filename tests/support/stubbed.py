"""Jobs on devices that a stand-in plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.config import Config
from lib.devices.base import Backend
from lib.plan.types import Hardware
from scripts import cluster
from tests.support.training import MemoryRecord, random_data, small_config, small_job, small_plan
from train.job import Job, Progress
from train.loop import optimizer_step

XLA_STUB, TPU_STUB = (
    Path(__file__).resolve().parents[1] / f"fixtures/torch_{name}_stub" for name in ("xla", "tpu")
)


def job_on(backend: Backend, *cut: int, task: Any = lambda task: task, **changes: Any) -> Job:
    config = small_config(**changes)
    data = random_data(config, shape=(1, 28, 28), train_size=40, test_size=10)
    return small_job(config, small_plan(*cut), data, backend=backend, record=MemoryRecord(), task=task)


def asked_for_in_a_step(job: Job, calls: list[str]) -> list[str]:
    job.optimizer.register_step_post_hook(lambda *_: calls.append("update"))
    calls.clear()
    optimizer_step(job, Progress())
    return list(calls)


def no_probe(_: str) -> Hardware:
    raise AssertionError("nobody is asked")


def printed_elsewhere(config: Config, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What make launch-print says on a machine that is not one of those that train."""
    monkeypatch.setattr(cluster, "probe", no_probe)
    return cluster.command_line(config, name="x", runs=Path("runs")).splitlines()
