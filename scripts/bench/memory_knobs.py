"""Cost of less memory: peak and work of training with each choice of GRAD_CHECKPOINT, on a CPU.

    python -m scripts.bench.memory_knobs DEFCONFIG ... [CONFIG_NAME=VALUE ...] [--micro-batch N] [--rounds N]

Bytes of tensors at the peak and operations of a step are predicted. What a step needs of memory is measured
in a process of its own, as make probe does. Time is CPU time, for steps of all choices in turns,
and the fastest of each counts: so other programs on the machine disturb it least.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lib import kconf
from lib.config import config_from_values
from lib.devices.probe import probe
from lib.errors import ToolkitError, run_main
from lib.nn.activation_checkpointing import CHOICES, Recompute
from lib.plan.fitting import step_settings
from lib.plan.probe_search import Failure
from lib.plan.types import Plan
from lib.units import seconds_text
from scripts.bench.interleaved_timing import Run, interleaved, job_of, steps_of
from train.planning.autotune import ProbeTarget, probe_run
from train.planning.memory_estimate import MemoryTraces
from train.training_data import open_training_data

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = 2  # of a step: with more the first ones weigh more, and nothing else changes


class PlannedRun(NamedTuple):
    """One choice of GRAD_CHECKPOINT and its plan."""

    target: ProbeTarget
    plan: Plan
    memory_traces: MemoryTraces


def main() -> int:
    """Print the table for the defconfigs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", help="defconfigs, and CONFIG_NAME=VALUE for all of them")
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = dict(name.split("=", 1) for name in options.names if "=" in name)
    settings |= {
        "CONFIG_DEVICE_CPU": "y",
        "CONFIG_TARGET_EFFECTIVE_BATCH": str(MICRO_BATCHES * options.micro_batch),
    }
    print("| defconfig, micro-batch | again | tensors, predicted | need, measured | work, predicted | time |")
    print("|---|---|---|---|---|---|")
    for name in options.names:
        if "=" not in name:
            compare(name, settings, micro_batch=options.micro_batch, rounds=options.rounds)
    return 0


def compare(name: str, settings: Mapping[str, str], *, micro_batch: int, rounds: int) -> None:
    """Print a row for each choice of GRAD_CHECKPOINT."""
    cases = {choice: case_of(name, settings, choice, micro_batch=micro_batch) for choice in CHOICES}
    seconds = cpu_seconds(cases, rounds=rounds)
    flop = {
        choice: traces.of(step_settings(plan), target.hardware).step_flop
        for choice, (target, plan, traces) in cases.items()
    }
    for choice, (target, plan, _) in cases.items():
        outcome = probe_run(target, plan, micro_batch)
        if isinstance(outcome, Failure):
            raise ToolkitError(f"{name} with {choice} did not run", why=outcome.reason)
        tensors = target.memory(plan, micro_batch).peak_bytes
        sizes = f"{tensors / 1e6:.0f} MB | {outcome.need_bytes / 1e6:.0f} MB"
        work, took = flop[choice] / flop["none"] - 1, seconds[choice] / seconds["none"] - 1
        cost = f"{work:+.0%} | {took:+.0%}" if choice != "none" else f" | {seconds_text(seconds[choice])}"
        print(f"| {name}, {micro_batch} | {choice} | {sizes} | {cost} |", flush=True)


def case_of(name: str, settings: Mapping[str, str], choice: Recompute, *, micro_batch: int) -> PlannedRun:
    """Plan defconfig `name` with one choice."""
    overrides = {**settings, f"CONFIG_GRAD_CHECKPOINT_{choice.upper()}": "y"}
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides=overrides)
    config, hardware = config_from_values(resolved.values), probe("cpu")
    data = open_training_data(config, root=ROOT, log=lambda _: None)
    memory_traces = MemoryTraces(config, data)
    target = ProbeTarget.of(resolved, data, hardware, root=ROOT, predict=memory_traces.predictor(hardware))
    plan = dataclasses.replace(
        target.plan(), micro_batch=micro_batch, last_micro_batch=micro_batch, accumulation=MICRO_BATCHES
    )
    return PlannedRun(target, plan, memory_traces)


def cpu_seconds(cases: Mapping[Recompute, PlannedRun], *, rounds: int) -> dict[str, float]:
    """Return the CPU seconds of the fastest optimizer step of each choice."""
    runs: dict[str, Run] = {}
    for choice, (target, plan, _) in cases.items():
        job = job_of(target.config, plan, target.data, target.hardware)
        runs[choice] = steps_of(job, clock=time.process_time)
    # The steps that warm up make the optimizer's state.
    _, seconds = interleaved(runs, rounds=rounds, round_seconds=0, warm_up=1)
    return {choice: min(times) for choice, times in seconds.items()}


if __name__ == "__main__":
    sys.exit(run_main(main))
