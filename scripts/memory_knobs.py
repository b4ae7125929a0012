"""What less memory costs: the peak and the speed of training with each choice of GRAD_CHECKPOINT.

    python -m scripts.memory_knobs DEFCONFIG ... [--micro-batch N] [--rounds N] [CONFIG_NAME=VALUE ...]

Each choice is trained for some steps in a process of its own, on this machine, in rounds that take turns;
the fastest round counts. Beside what was measured stands what was predicted of the tensors' peak.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from lib import kconf
from lib.config import config_from_values
from lib.errors import ToolkitError, run_main
from lib.hardware import probe
from lib.plan.probing import Failure
from lib.plan.types import Plan
from lib.recompute import CHOICES
from train.forecast import Footprints
from train.probing import Bench, trial
from train.setup import open_subject

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", help="defconfigs, and CONFIG_NAME=VALUE for all of them")
    parser.add_argument("--micro-batch", type=int, default=0, help="0: the planned one")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    settings = dict(name.split("=", 1) for name in options.names if "=" in name)
    print("| defconfig | micro-batch | recomputed | tensors, predicted | need, measured | samples/s |")
    print("|---|---|---|---|---|---|")
    for name in options.names:
        if "=" not in name:
            compare(name, settings, micro_batch=options.micro_batch, rounds=options.rounds)
    return 0


def compare(name: str, settings: Mapping[str, str], *, micro_batch: int, rounds: int) -> None:
    """Print a row for each choice of what is computed again."""
    benches = {choice: bench_of(name, settings, choice) for choice in CHOICES}
    plans = {choice: planned(bench, micro_batch) for choice, bench in benches.items()}
    # The peak hardly varies; whatever else the machine does makes steps slower, never faster.
    needs = dict.fromkeys(CHOICES, 0)
    rates = dict.fromkeys(CHOICES, 0.0)
    for _ in range(rounds):
        for choice, bench in benches.items():
            outcome = trial(bench, plans[choice], plans[choice].micro_batch)
            if isinstance(outcome, Failure):
                raise ToolkitError(f"{name} with {choice} recomputed did not run", why=outcome.reason)
            needs[choice] = max(needs[choice], outcome.need_bytes)
            rates[choice] = max(rates[choice], outcome.samples_per_second)
    for choice, plan in plans.items():
        tensors = benches[choice].memory(plan, plan.micro_batch).peak_bytes
        sizes = f"{tensors / 1e6:.0f} MB | {needs[choice] / 1e6:.0f} MB"
        cost = rates["none"] / rates[choice] - 1
        print(
            f"| {name} | {plan.micro_batch} | {choice} | {sizes} | {rates[choice]:.4g} ({cost:+.0%} time) |"
        )
    sys.stdout.flush()


def bench_of(name: str, settings: Mapping[str, str], choice: str) -> Bench:
    overrides = {**settings, f"CONFIG_GRAD_CHECKPOINT_{choice.upper()}": "y"}
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / name, overrides=overrides)
    config = config_from_values(resolved.values)
    subject, hardware = open_subject(config, root=ROOT, say=lambda _: None), probe(config.device)
    return Bench(
        resolved=resolved,
        config=config,
        subject=subject,
        hardware=hardware,
        predict=Footprints(config, subject).predictor(hardware),
        root=ROOT,
    )


def planned(bench: Bench, micro_batch: int) -> Plan:
    decided = bench.plan()
    if not micro_batch:
        return decided
    share = decided.effective_batch // decided.world
    if share % micro_batch:
        raise ToolkitError(f"a device's share of {share} samples cannot be cut into {micro_batch}")
    return dataclasses.replace(
        decided, micro_batch=micro_batch, last_micro_batch=micro_batch, accumulation=share // micro_batch
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
