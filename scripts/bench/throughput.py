"""Measure the loop against a bare hand-written one, and bf16 against fp32: `make bench`.

What is compared runs in one process, interleaved, and trains the configured model on the configured data,
with the micro-batch that the plan finds for this machine. The loop and the bare loop work in fp32 on the
same resident data with the same optimizer, one micro-batch a step, without augmentation and compilation;
the toolkit's side has everything else on: schedule, metrics rows, progress, console, checks. Then the
toolkit's fp32 is compared with its bf16. Times are minima over rounds; the ratio is what counts.

A task without a loop by hand may have a comparison of its own, which is made instead: `scripts/bench/tasks`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lib import atomic, kconf
from lib.config import Config, config_from_values
from lib.data import ArrayPart, Dataset, ImageSpec, TextSpec
from lib.data.sampler import with_lengths
from lib.devices.base import Backend
from lib.devices.probe import probe
from lib.errors import ConfigError, run_main
from lib.hyperparams import apply_hyperparams
from lib.nn.dropout import dropouts, key_samples
from lib.nn.model_code import build_model
from lib.plan import plan as make_plan
from lib.plan.placement import refuse_static_shapes
from lib.plan.types import Precision
from lib.runs.console import Console
from lib.tiers import with_tier
from lib.units import counted
from scripts.bench.interleaved_timing import Clock, Run, interleaved, table
from scripts.bench.product_rate import product_rate, shares
from train import loop
from train.build import make_job, optimizer_of
from train.commands import PlannedRun, create_run
from train.job import Budget, Progress
from train.planning.memory_estimate import MemoryTraces
from train.planning.run_plan import RunRequest
from train.record import RunRecord
from train.signals import Stopped
from train.training_data import open_training_data

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 5  # steps
NEVER = 10**9  # steps
BY_HAND = ("classify", "lm")  # kinds of learning
MAX_TOKENS = 1 << 24  # that the bare loop holds


def bare_loop(planned: PlannedRun, *, clock: Clock = time.perf_counter) -> Run:
    """Return a hand-written training loop, timed by `clock`."""
    config, spec, plan = planned.request.config, planned.data.dataset.spec, planned.plan
    backend, rows = Backend(plan.device), plan.micro_batch
    layout = torch.channels_last if plan.channels_last else torch.contiguous_format
    model = build_model(config.model, config.model_options, spec, seed=config.seed).to(backend.device)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]  # missing in torch's stubs
    masks = dropouts(model)
    optimizer = optimizer_of(config, plan, model)
    batches = bare_batches(planned.data.dataset, rows, device=backend.device)

    def run(steps: int) -> float:
        started = clock()
        for step in range(steps):
            inputs, targets = next(batches)
            key_samples(masks, seed=config.seed, first=step * rows, count=rows, device=backend.device)
            if inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=layout)
            with backend.autocast(plan.precision):
                logits = model(inputs)
            loss = F.cross_entropy(
                logits.float().flatten(0, -2), targets.flatten(), label_smoothing=config.label_smoothing
            )
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            if config.optim.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
            optimizer.step()
        backend.synchronize()
        return clock() - started

    return run


def bare_batches(dataset: Dataset, rows: int, *, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and targets: images and sentences in random order, texts from random places."""
    part, spec = dataset.train, dataset.spec
    if not isinstance(part, ArrayPart):
        tokens = torch.from_numpy(np.asarray(part.tokens[:MAX_TOKENS]).astype(np.int64)).to(device)
        offsets = torch.arange(part.block_size, device=device)
        while True:
            starts = torch.randint(len(tokens) - part.block_size, (rows, 1), device=device)
            yield tokens[starts + offsets], tokens[starts + offsets + 1]
    inputs, targets = (torch.from_numpy(array).to(device) for array in part.take())
    while True:
        order = torch.randperm(len(targets), device=device)
        for start in range(0, len(order) - rows + 1, rows):
            index = order[start : start + rows]
            batch = inputs.index_select(0, index)
            yield normalised(batch, spec) if isinstance(spec, ImageSpec) else batch, targets[index]


def normalised(images: Tensor, spec: ImageSpec) -> Tensor:
    """Normalise uint8 images (N, C, H, W) to float32 with the mean and deviation of `spec`."""
    shape = (1, spec.channels, 1, 1)
    mean, std = (torch.tensor(values, device=images.device).view(shape) for values in (spec.mean, spec.std))
    return images.float().mul_(1 / (255 * std)).sub_(mean / std)


class Stopwatch:
    """Wrapper that adds up the seconds of a function, to be subtracted."""

    def __init__(self, function: Callable[..., Any], clock: Clock) -> None:
        self.function, self.clock, self.seconds = function, clock, 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        started = self.clock()
        try:
            return self.function(*arguments, **options)
        finally:
            self.seconds += self.clock() - started


def toolkit_loop(planned: PlannedRun, *, clock: Clock = time.perf_counter) -> Run:
    """Return `train.loop` with all that `make train` has, timed by `clock`.

    The last step of each call evaluates and saves, which the bare loop does not: that time is left out.
    """
    request, data, hardware, plan = planned.request, planned.data, planned.hardware, planned.plan
    keep_last, backend = request.config.checkpoints.keep_last, Backend(plan.device)
    with quiet():
        run = create_run(planned)
        record = RunRecord(run, Console(run.log), started=request.started, keep_last=keep_last)
        job = make_job(request.config, plan, data, hardware=hardware, backend=backend, record=record)
        record.begin(0, None)
    progress = Progress()
    loop.assess, record.save = left_out = Stopwatch(loop.assess, clock), Stopwatch(record.save, clock)  # type: ignore[method-assign]

    def train_on(steps: int) -> float:
        job.budget = Budget(total_steps=progress.step + steps, total_seconds=None)
        before, started = sum(watch.seconds for watch in left_out), clock()
        try:
            with quiet():
                loop.train(job, progress)
        except Stopped as error:  # its hint to resume a run is not for this one
            raise KeyboardInterrupt from error
        seconds = clock() - started
        return seconds - (sum(watch.seconds for watch in left_out) - before)

    return train_on


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Write what is printed within the context to the null device, as fast as to a file."""
    with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null):
        yield


def configured() -> tuple[kconf.Resolved, Config]:
    """Return the configuration that `make bench` was called with."""
    resolved = with_tier(kconf.from_environment(ROOT), root=ROOT, log=lambda _: None)
    return resolved, config_from_values(resolved.values)


def show_comparison(module: str, config: Config, *, rounds: int, round_seconds: float) -> None:
    """Print what the comparison in `module`, of the model's task, finds."""
    data, hardware = open_training_data(config, root=ROOT, log=lambda _: None), probe(config.device)
    refuse_static_shapes(hardware.kind, what="make bench")
    compare_variants = importlib.import_module(module).compare
    for line in compare_variants(config, data, hardware, rounds=rounds, round_seconds=round_seconds):
        print(line)


def plain_case(folder: Path, resolved: kconf.Resolved, requested: Config) -> PlannedRun:
    """`requested` with its runs under `folder`: one micro-batch a step, on one device, in fp32.

    Raises ConfigError for a model that the bare loop cannot train.
    """
    if requested.task not in BY_HAND:
        raise ConfigError(
            f"make bench has no loop by hand for {requested.model}",
            why="a step of it is more than a forward pass and a cross-entropy",
        )
    data = open_training_data(requested, root=ROOT, log=lambda _: None)
    data = dataclasses.replace(data, dataset=with_short_evaluation(data.dataset))
    hardware = probe(requested.device)
    refuse_static_shapes(hardware.kind, what="make bench")
    requested = requested.replace(num_devices=1, norm_batch=0 if requested.norm_batch is not None else None)
    predict = MemoryTraces(requested, data).predictor(hardware)
    found = apply_hyperparams(requested, hardware=hardware, facts=data.facts, predict=predict)
    config = requested.replace(
        hyper_param="manual",
        batch_size=found.micro_batch,
        gradient_accumulation=1,
        target_effective_batch=0,
        compile="manual",
        compile_model=False,
        precision="fp32",
        channels_last=False,
        augment="none",
        data_placement="resident",
        ema=False,
        eval_interval_steps=NEVER,
        checkpoint_interval_steps=NEVER,
        checkpoint_seconds=0,
    )
    request = RunRequest(resolved=resolved, config=config, root=ROOT, runs=folder, started=time.monotonic())
    plan = make_plan(config, hardware, data.facts)
    return PlannedRun(request=request, data=data, hardware=hardware, plan=plan)


def with_short_evaluation(dataset: Dataset) -> Dataset:
    """Its time is left out, but every round would wait for it."""
    test = dataset.test
    if isinstance(test, ArrayPart):
        return dataclasses.replace(dataset, test=ArrayPart(*test.take(np.arange(min(test.size, 8)))))
    assert isinstance(dataset.spec, TextSpec)
    test = dataclasses.replace(test, tokens=test.tokens[: test.block_size])
    return dataclasses.replace(dataset, test=test, spec=with_lengths(dataset.spec, test, dataset.tokenizer))


def in_bf16(planned: PlannedRun) -> PlannedRun:
    """The same case in bf16, with the configured memory format."""
    channels_last = bool(planned.request.resolved.values["CHANNELS_LAST"])
    config = planned.request.config.replace(precision="bf16", channels_last=channels_last)
    request = dataclasses.replace(planned.request, config=config)
    plan = make_plan(config, planned.hardware, planned.data.facts)
    return dataclasses.replace(planned, request=request, plan=plan)


def compare(loops: Mapping[str, Run], *, rounds: int, round_seconds: float) -> dict[str, float]:
    """Run loops interleaved, print how their step rates relate to the first one's, return their minima."""
    steps, seconds = interleaved(loops, rounds=rounds, round_seconds=round_seconds, warm_up=WARM_UP)
    note = f"{steps} steps a round, {counted(torch.get_num_threads(), 'thread')}"
    for line in table(seconds, note=note, load=os.getloadavg()[0]):
        print(line)
    return {name: min(times) for name, times in seconds.items()}


def show_shares(planned: PlannedRun, step_seconds: Mapping[Precision, float]) -> None:
    """Print the share of the device's rate of products that a step of `planned` reaches."""
    flop, backend = planned.data.flop_per_sample, Backend(planned.plan.device)
    if flop is None:  # of a model that cannot be traced
        return
    rates = {precision: product_rate(precision, backend) for precision in step_seconds}
    for line in shares(flop * planned.plan.effective_batch, step_seconds, rates):
        print(line)


def main() -> int:
    """Compare the toolkit's loop with a bare one, and its bf16 with its fp32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a round of one loop takes")
    parser.add_argument("--peers", action="store_true", help="compare with other programs' loops")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of --peers, with one thread: for loaded machines"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the figures of --peers")
    options = parser.parse_args()
    if options.peers:
        from scripts.bench.peers import compare_all

        if options.out:  # before a quarter of an hour
            atomic.check_writable(options.out, "OUT", log=print, suffixes=[".json"])
        timing = ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
        return compare_all([*timing, *["--cpu-time"] * options.cpu_time], out=options.out)
    resolved, requested = configured()
    own = f"scripts.bench.tasks.{requested.task}"
    if importlib.util.find_spec(own) is not None:
        show_comparison(own, requested, rounds=options.rounds, round_seconds=options.seconds)
        return 0
    with tempfile.TemporaryDirectory() as name:
        with quiet():
            planned = plain_case(Path(name), resolved, requested)
        config, plan = planned.request.config, planned.plan
        print(f"{config.model} on {config.dataset}, {plan.micro_batch} samples a step, {plan.device}")
        plain = toolkit_loop(planned)
        loops = {"a bare loop": bare_loop(planned), "the toolkit": plain}
        known: dict[str, Any] = {"rounds": options.rounds, "round_seconds": options.seconds}
        fp32 = compare(loops, **known)["the toolkit"]
        if plan.device == "cpu" and planned.hardware.cpu_bf16 == "none":
            print("this CPU has no bf16 instructions: bf16 is not measured")
            show_shares(planned, {"fp32": fp32})
            return 0
        fast = in_bf16(planned)
        bf16 = "bf16 with channels last" if fast.plan.channels_last else "bf16"
        seconds = compare({"fp32": plain, bf16: toolkit_loop(fast)}, **known)
        show_shares(planned, {"fp32": seconds["fp32"], "bf16": seconds[bf16]})
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
