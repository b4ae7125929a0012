"""Interleaved timing, so that all that is compared meets the same disturbances by other programs."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from lib.config import Config
from lib.devices.base import Backend
from lib.plan.types import Hardware, Plan
from lib.sweeps.verdict import judge
from lib.units import seconds_text
from train import loop
from train.build import make_job
from train.job import Job, Progress
from train.record import Record
from train.training_data import TrainingData

Run: TypeAlias = Callable[[int], float]  # steps -> seconds
Clock: TypeAlias = Callable[[], float]


def job_of(config: Config, plan: Plan, data: TrainingData, hardware: Hardware) -> Job:
    """Build a job on the plan's device that records nothing."""
    return make_job(config, plan, data, hardware=hardware, backend=Backend(plan.device), record=Record())


def steps_of(job: Job, *, clock: Clock = time.perf_counter) -> Run:
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

    Each round begins with another run, and what the one before left for the garbage collector is collected
    first: otherwise one run would always pay for it.

    round_seconds: about how long a round of the slowest is. warm_up: steps that do not count, made twice.
    """
    for run in runs.values():
        run(warm_up)
    steps = max(1, round(round_seconds * warm_up / max(run(warm_up) for run in runs.values())))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = [*runs]
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            seconds[name].append(runs[name](steps) / steps)
    return steps, seconds


def table(seconds: Mapping[str, Sequence[float]], *, note: str = "", load: float) -> Iterator[str]:
    """Yield a line for each run: seconds of a step, and its step rate over that of the first.

    The rate, by minima, is undecided within the noise of the rounds: `is_undecided`.
    """
    (_, first), *_ = seconds.items()
    yield f"{note:32}{'minimum':>11}{'median':>11}{'rate':>8}{'by medians':>12}"
    for name, times in seconds.items():
        rates = rate(first, times), statistics.median(first) / statistics.median(times)
        numbers = f"{rates[0]:8.3f}{rates[1]:12.3f}" if times is not first else ""
        doubt = "  undecided" if times is not first and is_undecided(first, times) else ""
        least, median = seconds_text(min(times)), seconds_text(statistics.median(times))
        yield f"{name:32}{least:>11}{median:>11}{numbers}{doubt}"
    yield f"{len(first)} interleaved rounds; load of the machine in the last minute {load:.1f}"


def rate(first: Sequence[float], times: Sequence[float]) -> float:
    """Return the step rate of `times` over that of `first`, by minima."""
    return min(first) / min(times)


def is_undecided(first: Sequence[float], times: Sequence[float]) -> bool:
    """Return True unless a paired t test over the rounds and the minima agree on which of the two is faster.

    The times of a round meet the same disturbances, which multiply: their logarithms are compared.
    """
    if len(first) < 2:
        return True
    differences = [math.log(other / one) for one, other in zip(first, times, strict=True)]
    verdict = judge(differences, [len(first)], higher_is_better=False)
    return verdict.word != ("better" if rate(first, times) > 1 else "worse")
