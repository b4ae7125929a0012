"""Measure the loop against a bare hand-written one, and bf16 against fp32: `make bench`.

What is compared runs in one process, in turn. The loop and the bare loop train LeNet-5 at
micro-batch 64 in fp32 on the same resident bytes with the same normalisation and the same fused
AdamW, which decays weights and not biases. The toolkit's side has everything on: schedule,
metrics rows, progress, console, checks. Precisions are compared on ResNet-18 at micro-batch 32:
fp32 against bf16 with channels last. Times are minima over rounds; the ratio is what counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from lib import kconf
from lib.backend import Backend
from lib.config import config_from_values
from lib.console import Console
from lib.data import ArrayPart, ImageSpec
from lib.errors import run_main
from lib.hardware import probe
from lib.optim import make_optimizer
from lib.plan import plan as make_plan
from lib.registry import build_model
from train import loop
from train.budget import Budget
from train.commands import Case, Order, create_run
from train.job import Progress
from train.record import RunRecord
from train.setup import Subject, make_job, open_subject

ROOT = Path(__file__).resolve().parents[1]
BATCH = 64
SETTINGS = {
    "CONFIG_AUGMENT_NONE": "y",
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_HYPER_PARAM_MANUAL": "y",
    "CONFIG_GRADIENT_ACCUMULATION": "1",
    "CONFIG_COMPILE_MANUAL": "y",
    "CONFIG_COMPILE_MODEL": "n",
    "CONFIG_CHECKPOINT_SECONDS": "0",
    "CONFIG_EVAL_INTERVAL_STEPS": "1000000",
}
PLAIN = {"CONFIG_PRECISION_FP32": "y", "CONFIG_CHANNELS_LAST": "n"}
LENET5 = {"CONFIG_MODEL_LENET5": "y", "CONFIG_BATCH_SIZE": str(BATCH)}
RESNET18 = {"CONFIG_MODEL_RESNET18": "y", "CONFIG_BATCH_SIZE": "32"}


def bare_loop(subject: Subject, *, seed: int) -> Callable[[int], float]:
    """The loop one would write by hand. Returns a function: steps -> seconds."""
    part, spec = subject.dataset.train, subject.dataset.spec
    assert isinstance(part, ArrayPart) and isinstance(spec, ImageSpec)
    images, labels = torch.from_numpy(part.inputs[:]), torch.from_numpy(part.targets[:])
    model = build_model("lenet5", {}, spec, seed=seed)
    optimizer = make_optimizer(
        model,
        name="adamw",
        learning_rate=1e-3,
        weight_decay=0.05,
        momentum=None,
        nesterov=False,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
    )
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
            batch = images.index_select(0, index).float().mul_(scale).add_(offset)
            loss = F.cross_entropy(model(batch), labels.index_select(0, index))
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
        return time.perf_counter() - started

    return run


class Stopwatch:
    """Adds up the time that a function takes, to be left out."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.function(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - started


def toolkit_loop(case: Case) -> Callable[[int], float]:
    """`train.loop` with all that `make train` has. Returns a function: steps -> seconds.

    The last step of each call evaluates and saves, which the bare loop does not: that time is left out.
    """
    run = create_run(case)
    config = case.order.config
    record = RunRecord(run, Console(run.log), started=case.order.started, keep_last=config.keep_last)
    backend = Backend("cpu")
    job = make_job(config, case.plan, case.subject, hardware=case.hardware, backend=backend, record=record)
    progress = Progress()
    record.begin(0, None)
    loop.evaluate, record.save = left_out = Stopwatch(loop.evaluate), Stopwatch(record.save)  # type: ignore[method-assign]

    def train_on(steps: int) -> float:
        job.budget = Budget(total_steps=progress.step + steps, total_seconds=None)
        before, started = sum(watch.seconds for watch in left_out), time.perf_counter()
        loop.train(job, progress)
        seconds = time.perf_counter() - started
        return seconds - (sum(watch.seconds for watch in left_out) - before)

    return train_on


def make_case(folder: Path, settings: dict[str, str]) -> Case:
    """A configuration of the benchmark's own, with its runs under `folder`."""
    (folder / "config").write_text("")
    resolved = kconf.load(root=ROOT, config_file=folder / "config", overrides=SETTINGS | settings)
    config = config_from_values(resolved.values)
    order = Order(resolved=resolved, config=config, root=ROOT, runs=folder, started=time.monotonic())
    subject = open_subject(config, root=ROOT, say=print)
    hardware = probe("cpu")
    plan = make_plan(config, hardware, subject.facts)
    return Case(order=order, subject=subject, hardware=hardware, plan=plan)


def compare(loops: Mapping[str, Callable[[int], float]], *, rounds: int, steps: int) -> None:
    """Run two loops in turn and print how their step rates relate."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for run in loops.values():
        run(steps)  # warm-up
    for _ in range(rounds):
        for name, run in loops.items():
            seconds[name].append(run(steps) / steps)
    for name, times in seconds.items():
        print(f"{name:24} {min(times) * 1e3:8.3f} ms/step (median {statistics.median(times) * 1e3:.3f})")
    (one, first), (other, second) = seconds.items()
    print(
        f"step rate of {other} over {one}: {min(first) / min(second):.3f} by minima, "
        f"{statistics.median(first) / statistics.median(second):.3f} by medians, "
        f"{rounds} interleaved rounds of {steps} steps, {torch.get_num_threads()} threads"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = make_case(folder, LENET5 | PLAIN)
        loops = {"a bare loop": bare_loop(case.subject, seed=1), "the toolkit": toolkit_loop(case)}
        compare(loops, rounds=options.rounds, steps=options.steps)
        if probe("cpu").cpu_bf16 == "none":
            print("this processor has no bf16 instructions: bf16 is not measured")
            return 0
        fast = {"CONFIG_PRECISION_BF16": "y", "CONFIG_CHANNELS_LAST": "y"}
        precisions = {
            "fp32": toolkit_loop(make_case(folder, RESNET18 | PLAIN)),
            "bf16 with channels last": toolkit_loop(make_case(folder, RESNET18 | fast)),
        }
        compare(precisions, rounds=max(3, options.rounds // 4), steps=max(1, options.steps // 100))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
