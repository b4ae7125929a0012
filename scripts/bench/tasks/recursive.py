"""`make bench` of a Tiny Recursive Model: a step with each of its mixers, side by side.

Both have the configured width, depth, batch and data, and train by the toolkit's own loop in one process, in
turn. Both obey one plan: that of the smaller micro-batch, where the two would have different ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lib.config import Config
from lib.plan.types import Hardware
from scripts.bench.interleaved_timing import interleaved, job_of, steps_of
from train.planning.command import look_ahead
from train.planning.memory_estimate import MemoryTraces
from train.training_data import TrainingData, make_training_data

MIXERS = ("mlp", "attention")
WARM_UP = 2  # steps: the first has no carry


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one mixer."""

    parameters: int  # trained ones
    step_flop: int  # of an optimizer step, as the plan counts it
    step_seconds: tuple[float, ...]  # of an optimizer step, in each round

    @property
    def seconds(self) -> float:
        """Seconds of the fastest step."""
        return min(self.step_seconds)


def compare(
    config: Config, data: TrainingData, hardware: Hardware, *, rounds: int, round_seconds: float
) -> Iterator[str]:
    """Train both for a few steps; yield the lines of a table of their parameters, FLOP and times."""
    variants = {}
    for mixer in MIXERS:
        options = {**config.model_options, "mixer": mixer}
        variant = config.replace(num_devices=1, model_options=options)
        own = make_training_data(variant, data.dataset)
        outlook = look_ahead(variant, own, hardware, MemoryTraces(variant, own), alternatives=False)
        variants[mixer] = variant, own, outlook
    plan = min((outlook.plan for _, _, outlook in variants.values()), key=lambda one: one.micro_batch)
    jobs = {mixer: job_of(variant, plan, own, hardware) for mixer, (variant, own, _) in variants.items()}
    runs = {mixer: steps_of(job) for mixer, job in jobs.items()}
    steps, seconds = interleaved(runs, rounds=rounds, round_seconds=round_seconds, warm_up=WARM_UP)
    yield (
        f"{config.model} on {config.dataset}: {plan.effective_batch} samples a step, {plan.micro_batch} at a "
        f"time, {plan.device}, {plan.precision}, {'' if plan.compile else 'not '}compiled"
    )
    found = {}
    for mixer, job in jobs.items():
        parameters = sum(weight.numel() for weight in job.model.parameters())
        step_flop = variants[mixer][2].step_flop
        found[mixer] = Measured(
            parameters=parameters, step_flop=step_flop, step_seconds=tuple(seconds[mixer])
        )
    yield from table(found)
    yield f"{rounds} interleaved rounds of {steps} steps, {torch.get_num_threads()} threads"


def table(found: Mapping[str, Measured]) -> Iterator[str]:
    """Yield a line for each, and the ratio of the second to the first. Times are minima over rounds."""
    yield f"{'':16}{'parameters':>12}{'GFLOP/step':>12}{'s/step':>10}{'median':>10}{'GFLOP/s':>10}"
    for name, one in found.items():
        work, median = one.step_flop / 1e9, statistics.median(one.step_seconds)
        times = f"{one.seconds:>10.4g}{median:>10.4g}{work / one.seconds:>10.4g}"
        yield f"{name:16}{one.parameters:>12,}{work:>12.4g}{times}"
    (first, one), (second, other) = found.items()
    work, time_taken = other.step_flop / one.step_flop, other.seconds / one.seconds
    times = f"{time_taken:>10.3f}{'':10}{work / time_taken:>10.3f}"
    yield f"{f'{second}/{first}':16}{other.parameters / one.parameters:>12.3f}{work:>12.3f}{times}"
