"""What less memory costs: peak and work of training with each choice of GRAD_CHECKPOINT, on a processor.

    python -m scripts.bench.memory_knobs DEFCONFIG ... [CONFIG_NAME=VALUE ...] [--micro-batch N] [--rounds N]

Bytes of tensors at the peak and operations of a step are predicted. What a step needs of memory is measured
in a process of its own, as make probe does. Time is that of the processor, for steps of all choices in turns,
and the fastest of each counts: so other programs on the machine disturb it least.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lib import kconf
from lib.config import config_from_values
from lib.devices.base import Backend
from lib.devices.probe import probe
from lib.errors import ToolkitError, run_main
from lib.nn.activation_checkpointing import CHOICES, Recompute
from lib.plan.fitting import trial_of
from lib.plan.probing import Failure
from lib.plan.types import Plan
from train import loop
from train.build import make_job
from train.job import Job, Progress
from train.planning.autotune import Bench, trial
from train.planning.memory_estimate import Footprints
from train.record import SilentRecord
from train.training_data import open_subject

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = 2  # of a step: with more the first ones weigh more, and nothing else changes


@dataclass(frozen=True, slots=True)
class Case:
    """One choice, and how it is trained."""

    bench: Bench
    plan: Plan
    footprints: Footprints


def main() -> int:
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
    """Print a row for each choice of what is computed again."""
    cases = {choice: case_of(name, settings, choice, micro_batch=micro_batch) for choice in CHOICES}
    seconds = processor_seconds(cases, rounds=rounds)
    flop = {choice: _step_flop(case) for choice, case in cases.items()}
    for choice, case in cases.items():
        outcome = trial(case.bench, case.plan, micro_batch)
        if isinstance(outcome, Failure):
            raise ToolkitError(f"{name} with {choice} did not run", why=outcome.reason)
        tensors = case.bench.memory(case.plan, micro_batch).peak_bytes
        sizes = f"{tensors / 1e6:.0f} MB | {outcome.need_bytes / 1e6:.0f} MB"
        work, took = flop[choice] / flop["none"] - 1, seconds[choice] / seconds["none"] - 1
        cost = f"{work:+.0%} | {took:+.0%}" if choice != "none" else f" | {seconds[choice]:.2f} s"
        print(f"| {name}, {micro_batch} | {choice} | {sizes} | {cost} |", flush=True)


def case_of(name: str, settings: Mapping[str, str], choice: Recompute, *, micro_batch: int) -> Case:
    overrides = {**settings, f"CONFIG_GRAD_CHECKPOINT_{choice.upper()}": "y"}
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides=overrides)
    config, hardware = config_from_values(resolved.values), probe("cpu")
    subject = open_subject(config, root=ROOT, say=lambda _: None)
    footprints = Footprints(config, subject)
    bench = Bench.of(resolved, subject, hardware, root=ROOT, predict=footprints.predictor(hardware))
    plan = dataclasses.replace(
        bench.plan(), micro_batch=micro_batch, last_micro_batch=micro_batch, accumulation=MICRO_BATCHES
    )
    return Case(bench, plan, footprints)


def processor_seconds(cases: Mapping[Recompute, Case], *, rounds: int) -> dict[Recompute, float]:
    """Of the fastest optimizer step of each choice."""
    jobs = {choice: _job(case) for choice, case in cases.items()}
    found: dict[Recompute, list[float]] = {choice: [] for choice in cases}
    for step in range(1 + rounds):  # the first one makes the optimizer's state
        for choice, job in jobs.items():
            started = time.process_time()
            loop.optimizer_step(job, Progress(step=step))
            found[choice].append(time.process_time() - started)
    return {choice: min(seconds[1:]) for choice, seconds in found.items()}


def _job(case: Case) -> Job:
    bench = case.bench
    return make_job(
        bench.config,
        case.plan,
        bench.subject,
        hardware=bench.hardware,
        backend=Backend("cpu"),
        record=SilentRecord(),
    )


def _step_flop(case: Case) -> int:
    return case.footprints.of(trial_of(case.plan), case.bench.hardware).step_flop


if __name__ == "__main__":
    sys.exit(run_main(main))
