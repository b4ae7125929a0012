"""Measure the loop against a bare hand-written one, in one process, in turn: `make bench`.

Both train LeNet-5 at micro-batch 64 in fp32 on the same resident bytes with the same
normalisation and the same fused AdamW. The toolkit's side has everything on: schedule,
metrics rows, progress, console, checks. Times are minima over rounds; the ratio is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from lib import kconf
from lib.backend import Backend
from lib.config import config_from_values
from lib.errors import run_main
from lib.hardware import probe
from lib.plan import plan as make_plan
from lib.registry import build_model
from train.budget import Budget
from train.commands import open_record
from train.loop import Progress, train
from train.setup import Subject, make_job, open_subject

ROOT = Path(__file__).resolve().parents[1]
BATCH = 64
SETTINGS = {
    "CONFIG_MODEL_LENET5": "y",
    "CONFIG_DATASET_DIGITS": "y",
    "CONFIG_AUGMENT_NONE": "y",
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_PRECISION_FP32": "y",
    "CONFIG_HYPER_PARAM_MANUAL": "y",
    "CONFIG_BATCH_SIZE": str(BATCH),
    "CONFIG_GRADIENT_ACCUMULATION": "1",
    "CONFIG_CHANNELS_LAST": "n",
    "CONFIG_COMPILE_MANUAL": "y",
    "CONFIG_COMPILE_MODEL": "n",
    "CONFIG_CHECKPOINT_SECONDS": "0",
    "CONFIG_EVAL_INTERVAL_STEPS": "1000000",
}


def bare_loop(subject: Subject, *, seed: int) -> Callable[[int], float]:
    """The loop one would write by hand. Returns a function: steps -> seconds."""
    part, spec = subject.dataset.train, subject.dataset.spec
    images, labels = torch.from_numpy(part.images[:]), torch.from_numpy(part.labels[:])
    model = build_model("lenet5", {}, spec, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    scale, offset = 1 / (255 * spec.std[0]), -spec.mean[0] / spec.std[0]
    order, position = torch.randperm(len(labels)), 0

    def run(steps: int) -> float:
        nonlocal order, position
        started = time.perf_counter()
        for _ in range(steps):
            if position + BATCH > len(labels):
                order, position = torch.randperm(len(labels)), 0
            index = order[position : position + BATCH]
            position += BATCH
            loss = F.cross_entropy(model(images[index].float().mul_(scale).add_(offset)), labels[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return time.perf_counter() - started

    return run


def toolkit_loop(subject: Subject, runs: Path, *, resolved: kconf.Resolved) -> Callable[[int], float]:
    """`train.loop` with all that `make train` has. Returns a function: steps -> seconds of training."""
    config = config_from_values(resolved.values)
    hardware = probe("cpu")
    plan = make_plan(config, hardware, subject.facts)
    record = open_record(resolved, runs=runs, plan=plan, hardware=hardware)
    job = make_job(config, plan, subject, hardware=hardware, backend=Backend("cpu"), record=record)
    progress = Progress()

    def run(steps: int) -> float:
        before = progress.seconds
        job.budget = Budget(total_steps=progress.step + steps, total_seconds=None)
        train(job, progress)
        return progress.seconds - before

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        config_file = runs / "config"
        config_file.write_text("")
        resolved = kconf.load(root=ROOT, config_file=config_file, overrides=SETTINGS)
        record = open_record(resolved, runs=runs, plan=None, hardware=None)
        subject = open_subject(config_from_values(resolved.values), root=ROOT, record=record)
        loops = {
            "bare": bare_loop(subject, seed=1),
            "toolkit": toolkit_loop(subject, runs, resolved=resolved),
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for loop in loops.values():
            loop(options.steps)  # warm-up
        for _ in range(options.rounds):
            for name, loop in loops.items():
                seconds[name].append(loop(options.steps) / options.steps)
    for name, times in seconds.items():
        print(f"{name:8} {min(times) * 1e3:7.3f} ms/step (median {statistics.median(times) * 1e3:.3f})")
    best = min(seconds["bare"]) / min(seconds["toolkit"])
    middle = statistics.median(seconds["bare"]) / statistics.median(seconds["toolkit"])
    print(
        f"step rate of the toolkit over bare: {best:.3f} by minima, {middle:.3f} by medians, "
        f"{options.rounds} interleaved rounds of {options.steps} steps, {torch.get_num_threads()} threads"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
