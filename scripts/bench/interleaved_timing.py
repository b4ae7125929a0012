"""Interleaved timing, so that all that is compared meets the same disturbances by other programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from lib.config import Config
from lib.devices.base import Backend
from lib.plan.types import Hardware, Plan
from train import loop
from train.build import make_job
from train.job import Job, Progress
from train.record import Record
from train.training_data import TrainingData

Run: TypeAlias = Callable[[int], float]  # steps -> seconds


def job_of(config: Config, plan: Plan, data: TrainingData, hardware: Hardware) -> Job:
    """Build a job on the plan's device that records nothing."""
    return make_job(config, plan, data, hardware=hardware, backend=Backend(plan.device), record=Record())


def steps_of(job: Job, *, clock: Callable[[], float] = time.perf_counter) -> Run:
    """Return a run that makes optimizer steps of `job`, timed by `clock`."""
    progress = Progress()

    def run(steps: int) -> float:
        started = clock()
        for _ in range(steps):
            loop.optimizer_step(job, progress)
            progress.step += 1
        job.backend.synchronize()
        return clock() - started

    return run


def interleaved(
    runs: Mapping[str, Run], *, rounds: int, round_seconds: float, warm_up: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the steps of a round, and for each run the seconds of a step in every round.

    round_seconds: about how long a round of the slowest is. warm_up: steps that do not count, made twice.
    """
    for run in runs.values():
        run(warm_up)
    steps = max(1, round(round_seconds * warm_up / max(run(warm_up) for run in runs.values())))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run(steps) / steps)
    return steps, seconds
