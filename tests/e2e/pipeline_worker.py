"""Ranks that train a small language model as a pipeline: `pipeline_worker DIRECTORY [checkpoints]`.

Rank 0 of two and of three stages leaves DIRECTORY/WORLD.pt. The test calls `outcome` itself for one process.
With checkpoints, runs go on from those of other numbers of processes, and after a kill.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.config import Config
from lib.devices.base import Backend
from lib.plan.types import Plan
from lib.runs import checkpoint
from lib.runs.console import Console
from tests.e2e.ranks import endings
from tests.e2e.sharded_checkpoint_worker import run_of
from tests.support.tokens import BLOCK, VOCAB, sentences_data, small_lm_config, text_data
from tests.support.training import ADAPTERS, MemoryRecord, Wrapped, small_job, small_plan
from train.job import Job, Progress, evaluate
from train.loop import _save, load_state_dict, optimizer_step, state_dict, train
from train.record import AsyncCheckpointer, Record, RunRecord
from train.training_data import TrainingData

LAYERS = 4  # stages of different lengths
STEPS = 3
CHAIN, EACH = (2, 1, 3), 2  # processes one after the other, and steps of each
FORMS = ("full", "sharded", "async")
FROZEN = ("backbone.token", "backbone.position", "backbone.blocks.0", "backbone.blocks.1")
LONG = {"max_steps": EACH * len(CHAIN)}
RECIPE = {
    "optimizer": "adamw",
    "grad_clip": 0.05,
    "ema": True,
    "ema_decay": 0.5,
    "max_steps": STEPS,
    "eval_interval_steps": 1,
}
SIZES = {"even": (4, 4, 4, 4), "ragged": (5, 5, 5, 1), "one": (16,), "fewer than stages": (9, 7)}
# Sizes of micro-batches, the fraction that dropout drops, and settings.
CASES: dict[str, tuple[tuple[int, ...], float, dict[str, Any]]] = {
    **{name: (sizes, 0.2, {}) for name, sizes in SIZES.items()},
    "recomputed": (SIZES["ragged"], 0.2, {"grad_checkpoint": "all"}),
    "chunked": (SIZES["even"], 0.0, {"chunked_cross_entropy": True}),
    "sgd": (SIZES["even"], 0.0, {"optimizer": "sgd", "momentum": 0.9}),
    "muon": (
        SIZES["even"],
        0.0,
        {"optimizer": "muon", "muon_learning_rate": 0.02, "momentum": 0.9, "nesterov": True},
    ),
    "atan2": (SIZES["even"], 0.0, {"optimizer": "adam_atan2"}),
    # A step of Adam is as long for a gradient that is only rounding, as that of the keys' bias is.
    "bf16": (SIZES["ragged"], 0.2, {"precision": "bf16", "optimizer": "sgd", "momentum": 0.9}),
    "labels": (SIZES["ragged"], 0.2, {"label_smoothing": 0.1}),
    "adapters": (SIZES["ragged"], 0.2, {**ADAPTERS, "grad_checkpoint": "all"}),
    # The tied embedding, and all of the first stage.
    "frozen": (SIZES["ragged"], 0.2, {"freeze": " ".join(FROZEN), "layer_decay": 0.5}),
}
# What is recomputed or optimized within a stage does not depend on their number.
OF_WORLD = {2: list(CASES), 3: [*SIZES, "labels", "adapters", "frozen"]}


def config_of(name: str, **changes: Any) -> Config:
    _, dropout, settings = CASES[name]
    config = small_lm_config().replace(**RECIPE | settings | changes)
    return config.replace(model_options={**config.model_options, "layers": LAYERS, "dropout": dropout})


@functools.cache
def data_of(name: str) -> TrainingData:
    config = config_of(name)
    if name == "labels":
        return sentences_data(config, size=40)
    noise = np.random.default_rng(0).integers(0, VOCAB, 60 * BLOCK + 4).astype(np.uint8)
    return text_data(config, train=noise, test=noise[: 40 * BLOCK + 4])


def plan_of(name: str, world: int) -> Plan:
    sizes, _, _ = CASES[name]
    apart = {"world": world, "strategy": "pipeline", "shard": world} if world > 1 else {}
    precision = "bf16" if name == "bf16" else "fp32"
    return small_plan(*sizes, effective_batch=sum(sizes), precision=precision, **apart)


def job_of(name: str, backend: Backend, record: Record, **changes: Any) -> Job:
    plan = plan_of(name, backend.world)
    dtype = torch.float32 if name == "bf16" else torch.float64  # autocast leaves float64 as it is
    options: dict[str, Any] = {"backend": backend, "record": record, "dtype": dtype}
    return small_job(config_of(name, **changes), plan, data_of(name), **options)


def outcome(name: str, backend: Backend) -> dict[str, Any]:
    """State and rows of a run to its end."""
    record = MemoryRecord()
    job = job_of(name, backend, record)
    progress = Progress()
    result = train(job, progress)
    held = torch.tensor(sum(each.numel() for each in job.model.parameters() if not each.is_meta))
    found = {"state": state_dict(job, progress), "result": result, "rows": record.rows}
    return {**found, "held": [int(count) for count in backend.gather(held)]}


def optimize(job: Job, progress: Progress, *, steps: int) -> None:
    for _ in range(steps):
        optimizer_step(job, progress)
        progress.step += 1


def part_of(form: str, backend: Backend, directory: Path, *, steps: int) -> dict[str, Any]:
    """Resume the run of `form`, make some more steps, save and evaluate; return the state and the result."""
    run = run_of(directory, form, backend)
    record: Any = Record()
    if backend.is_main:
        record = RunRecord(run, Console(run.log), started=0.0, keep_last=9)
        record.begin(0, None)
    job = job_of("ragged", backend, record, **LONG)
    job.shard_directory = None if form == "full" else run.checkpoints
    loaded = checkpoint.load(run.checkpoints, log=record.log, ranks=backend)
    progress = Progress() if loaded is None else load_state_dict(job, loaded[1])
    optimize(job, progress, steps=steps)
    saver = AsyncCheckpointer(record, asynchronous=form == "async", sharded=job.shard_directory)
    with saver:
        _save(job, progress, saver, best=False)
    found = {"state": state_dict(job, progress), "result": evaluate(job)}
    if isinstance(record, RunRecord):
        record.close()
    backend.broadcast(None)
    return found


def ranked(world: int, work: Callable[[Backend], None]) -> None:
    assert endings(world, work) == [0] * world


def chain(directory: Path) -> None:
    """Two stages, one process and three stages make two steps each, from the checkpoint of those before."""
    for world in CHAIN:

        def work(backend: Backend) -> None:
            found = {form: part_of(form, backend, directory, steps=EACH) for form in FORMS}
            if backend.is_main:
                torch.save(found, directory / f"chain-{backend.world}.pt")

        ranked(world, work)


def killed(directory: Path) -> None:
    """The last of two stages is killed within a step after a checkpoint; two others go on from that."""

    def dies(backend: Backend) -> None:
        part_of("killed", backend, directory, steps=EACH)
        job = job_of("ragged", backend, MemoryRecord(), **LONG)
        if backend.rank == 1:

            def die(*_: object) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            job.task = Wrapped(job.task)
            job.task.training = die  # type: ignore[method-assign, assignment]
        optimize(job, Progress(), steps=1)

    def resumes(backend: Backend) -> None:
        found = part_of("killed", backend, directory, steps=2 * EACH)
        if backend.is_main:
            torch.save(found, directory / "resumed.pt")

    assert endings(2, dies) == [1, -signal.SIGKILL]
    ranked(2, resumes)


def main() -> None:
    directory = Path(sys.argv[1])
    for name in CASES:
        data_of(name)  # once, before there are several
    if sys.argv[2:] == ["checkpoints"]:
        chain(directory)
        killed(directory)
        return
    for world in OF_WORLD:

        def work(backend: Backend) -> None:
            found = {name: outcome(name, backend) for name in OF_WORLD[backend.world]}
            if backend.is_main:
                torch.save(found, directory / f"{backend.world}.pt")

        ranked(world, work)


if __name__ == "__main__":
    main()
