"""Ranks that train a small language model as a pipeline: `pipeline_worker DIRECTORY PART`.

Rank 0 of two and of three stages, and of two pipelines of two, leaves DIRECTORY/WORLD.pt. The test calls
`outcome` itself for one process. With a PART of OF_CHAINS, runs go on from the checkpoints of other layouts,
and with "checkpoints" after a kill, too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
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
from lib.plan.fitting import Split
from lib.plan.types import Layout, Plan, Strategy, rank_shares
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
STEPS = 2
STAGES = {2: 2, 3: 3, 4: 2}  # of a pipeline of so many processes
# Processes one after the other with their strategies, and steps of each.
CHAINS = {
    "stages": ((2, "pipeline"), (1, "single"), (3, "pipeline")),
    "replicas": ((4, "pipeline"), (1, "single"), (3, "ddp")),
}
EACH = 2
# Forms of the checkpoints of each. How a rank writes its part does not depend on the number of pipelines.
OF_CHAINS: dict[str, dict[str, tuple[str, ...]]] = {
    "checkpoints": {"stages": ("full", "async"), "replicas": ("sharded",)},
    "other checkpoints": {"stages": ("sharded",), "replicas": ("full", "async")},
}
FROZEN = ("backbone.token", "backbone.position", "backbone.blocks.0", "backbone.blocks.1")
LONG = {"max_steps": 3 * EACH}
RECIPE = {
    "optimizer": "adamw",
    "adam_eps": 1e-5,  # far above gradients that are rounding alone
    "grad_clip": 0.05,
    "ema": True,
    "ema_decay": 0.5,
    "max_steps": STEPS,
    "eval_interval_steps": 1,
    "keep_best": False,
}
SIZES = {
    "even": (4, 4, 4, 4),
    "ragged": (5, 5, 5, 1),
    "one": (16,),
    "fewer than stages": (9, 7),
    "unequal": (5, 5, 5, 2),
}
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
    "labels": (SIZES["ragged"], 0.2, {"label_smoothing": 0.1, "metrics": "roc_auc macro_f1"}),
    "adapters": (SIZES["ragged"], 0.2, {**ADAPTERS, "grad_checkpoint": "all"}),
    # The tied embedding, and all of the first stage.
    "frozen": (SIZES["ragged"], 0.2, {"freeze": " ".join(FROZEN), "layer_decay": 0.5}),
}
# What is recomputed or optimized within a stage does not depend on their number. The cases have each setting
# on two stages, and sizes and what stages share on more; the sweep has the others.
OF_WORLD = {
    "cases": {
        2: [name for name in CASES if name not in (*SIZES, "sgd")] + ["ragged"],
        3: ["ragged", "fewer than stages", "frozen"],
        4: ["ragged", "one", "labels"],
    },
    "sweep": {
        2: ["even", "one", "fewer than stages", "unequal", "sgd"],
        3: ["even", "one", "unequal", "labels", "adapters"],
        4: ["even", "fewer than stages", "unequal", "recomputed", "sgd", "muon", "adapters", "frozen"],
    },
}


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
    return text_data(config, train=noise, test=noise[: 13 * BLOCK + 4])


def plan_of(name: str, layout: Layout) -> Plan:
    sizes, _, _ = CASES[name]
    share = rank_shares(sum(sizes), world=layout.replicas)[0]
    split = dataclasses.asdict(Split.of(share, micro_batch=min(sizes[0], share)))
    own = {"world": layout.world, "strategy": layout.strategy, "shard": layout.shard, **split}
    precision = "bf16" if name == "bf16" else "fp32"
    return small_plan(*sizes, effective_batch=sum(sizes), precision=precision, **own)


def layout_of(world: int, strategy: Strategy = "pipeline") -> Layout:
    shard = STAGES[world] if strategy == "pipeline" and world > 1 else 1
    return Layout(strategy=strategy if world > 1 else "single", world=world, shard=shard)


def job_of(
    name: str, backend: Backend, record: Record, *, strategy: Strategy = "pipeline", **changes: Any
) -> Job:
    plan = plan_of(name, layout_of(backend.world, strategy))
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


def part_of(
    name: str, form: str, backend: Backend, directory: Path, *, steps: int, strategy: Strategy = "pipeline"
) -> dict[str, Any]:
    """Resume the run of `name`, make some more steps, save and evaluate; return the state and the result."""
    run = run_of(directory, name, backend)
    record: Any = Record()
    if backend.is_main:
        record = RunRecord(run, Console(run.log), started=0.0, keep_last=9)
        record.begin(0, None)
    job = job_of("unequal", backend, record, strategy=strategy, **LONG)
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


def chain(name: str, forms: tuple[str, ...], directory: Path) -> None:
    """Each layout makes two steps from the checkpoint of the one before."""
    for world, strategy in CHAINS[name]:

        def work(backend: Backend, strategy: Strategy = strategy) -> None:
            how: dict[str, Any] = {"steps": EACH, "strategy": strategy}
            found = {form: part_of(f"{name}-{form}", form, backend, directory, **how) for form in forms}
            if backend.is_main:
                torch.save(found, directory / f"{name}-{backend.world}.pt")

        ranked(world, work)


def killed(directory: Path) -> None:
    """A stage of two pipelines is killed within a step after a checkpoint; two others go on from that."""

    def dies(backend: Backend) -> None:
        part_of("killed", "killed", backend, directory, steps=EACH)
        job = job_of("unequal", backend, MemoryRecord(), **LONG)
        if backend.rank == 1:

            def die(*_: object) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            job.task = Wrapped(job.task)
            job.task.training = die  # type: ignore[method-assign, assignment]
        optimize(job, Progress(), steps=1)

    def resumes(backend: Backend) -> None:
        found = part_of("killed", "killed", backend, directory, steps=2 * EACH)
        if backend.is_main:
            torch.save(found, directory / "resumed.pt")

    assert endings(4, dies) == [1, -signal.SIGKILL, 1, 1]
    ranked(2, resumes)


def main() -> None:
    directory, part = Path(sys.argv[1]), sys.argv[2]
    importlib.import_module("train.pipeline")  # once, as the data
    names = {name for of_world in OF_WORLD.get(part, {}).values() for name in of_world} or {"unequal"}
    for name in sorted(names):
        data_of(name)  # once, before there are several
    for name, forms in OF_CHAINS.get(part, {}).items():
        chain(name, forms, directory)
    if part == "checkpoints":
        killed(directory)
    for world, names in OF_WORLD.get(part, {}).items():

        def work(backend: Backend, names: list[str] = names) -> None:
            found = {name: outcome(name, backend) for name in names}
            if backend.is_main:
                torch.save(found, directory / f"{backend.world}.pt")

        ranked(world, work)


if __name__ == "__main__":
    main()
