"""What an option can change: the data, the plan, a job, its training, how it is launched, what a run leaves.

Each witness takes a Config and gives what is compared. What merely repeats the configuration (reasons,
sentences, stored copies of it) is left out. That a ToolkitError is raised counts, what it says does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import torch

from lib.config import Config, config_from_values
from lib.devices.base import Backend
from lib.errors import ToolkitError
from lib.kconf import Resolved
from lib.plan.fitting import step_settings
from lib.plan.planner import compare_strategies
from lib.plan.types import fixed_plan
from lib.runs.directory import RunDir
from lib.runs.sinks import check_packages
from lib.tiers import with_tier
from scripts import cluster
from tests.contract.options import ROOT
from tests.contract.small_runs import (
    MACHINES,
    DataLocation,
    anonymous,
    emptied,
    first_rows,
    job_of,
    launched,
    machine,
    machine_of,
    needed,
    plan_here,
    plan_on,
    planned,
    say_nothing,
    services,
    silence,
    tried,
)
from tests.support.training import Wrapped
from train import commands, loop, upload
from train.job import Progress, checkpoint_format, saves_beside
from train.planning.memory_estimate import MemoryTraces

Outcome: TypeAlias = Any
Witness: TypeAlias = Callable[..., Outcome]

REFUSED = "refused"


def outcome(witness: Witness, place: DataLocation, requested: Resolved) -> Outcome:
    try:
        return witness(place, requested if witness is tiers else config_from_values(requested.values))  # type: ignore[arg-type]
    except ToolkitError:
        return REFUSED


def tiers(place: DataLocation, requested: Resolved) -> Outcome:  # noqa: ARG001
    """The values on a machine of each tier."""
    machines = ("cpu-8g", "rtx3090", "h100-80g-70g-free-x4")
    found = [with_tier(requested, root=ROOT, log=say_nothing, hardware=machine(name)) for name in machines]
    return [one.values["TIER"] if requested.values["TIER"] == "auto" else None for one in found]


def data(place: DataLocation, config: Config) -> Outcome:
    """The first rows of both parts, and what they are."""
    dataset = place.data(config).dataset
    return dataset.spec, *(first_rows(part) for part in (dataset.train, dataset.test))


def data_nowhere(place: DataLocation, config: Config) -> Outcome:
    """What is fetched where no file is there."""
    wanted: list[str] = []

    def fetch(target: Path, **_: object) -> None:
        wanted.append(target.name)
        raise ToolkitError("no network")

    with mock.patch("lib.data.datasets.download.fetch", fetch), contextlib.suppress(ToolkitError):
        DataLocation(place.root / "empty").data(config)
    return wanted


def data_damaged(place: DataLocation, config: Config) -> Outcome:
    """What becomes of a folder of images, one of which cannot be decoded."""
    if config.dataset != "image_folder":
        return None
    damaged = place.root / "damaged"
    folder = damaged / "data" / "image_folder"
    if not folder.exists():
        shutil.copytree(place.root / "data" / "image_folder", folder)
        (folder / "a" / "broken.png").write_bytes(b"no image")
    return DataLocation(damaged).data(config).facts


def model(place: DataLocation, config: Config) -> Outcome:
    """The shapes of its weights, what a sample takes of it, and of what data."""
    training_data = place.data(config)
    return training_data.facts, training_data.dataset.spec


def plans(place: DataLocation, config: Config) -> Outcome:
    """What is decided on each machine."""
    training_data = place.data(config)
    return {name: tried(planned, place, config, training_data, machine(name)) for name in MACHINES}


def job(place: DataLocation, config: Config) -> Outcome:
    """How samples reach the device where it has room for them and where not, and torch's own settings."""
    found = []
    for free_bytes in (1 << 40, 1 << 10):
        made, _ = job_of(place, config, free_bytes=free_bytes)
        with made.train_loader, made.eval_loader:
            store = made.train_loader._store
            pool = getattr(store, "_pool", None)
            threads = pool._max_workers if pool is not None else 0
            ahead = made.train_loader._epochs_ahead
            found += [type(store), threads, getattr(store, "_ahead", 0), ahead]
    return *found, torch.are_deterministic_algorithms_enabled()


def checkpoint_formats(place: DataLocation, config: Config) -> Outcome:
    """Whether a sharded and a replicated job write sharded checkpoints, with main memory and without.

    And whether a large state is written beside training.
    """
    made, _ = job_of(place, config)
    found = []
    with made.train_loader, made.eval_loader:
        for layout in ({"strategy": "ddp"}, {"strategy": "fsdp", "shard": 2}):
            made.plan = fixed_plan("test", micro_batch=2, world=2, **layout)
            found += [checkpoint_format(made, free_bytes=free_bytes)[0] for free_bytes in (1 << 40, 1 << 10)]
        with mock.patch("train.job.state_bytes", return_value=10**9):
            found.append(saves_beside(made, free_bytes=1 << 40, is_sharded=False)[0])
    return found


def training(place: DataLocation, config: Config) -> Outcome:
    """Rows and checkpoints of the whole run, by a clock that ticks once whenever it is read."""
    made, record = job_of(place, config)
    ticks = map(float, itertools.count())
    clock = SimpleNamespace(monotonic=partial(next, ticks), perf_counter=partial(next, ticks))
    still = SimpleNamespace(perf_counter=lambda: 0.0)
    with (
        made.train_loader,
        made.eval_loader,
        mock.patch("train.signals.time", clock),
        mock.patch("lib.data.loader.time", still),
    ):
        loop.train(made, Progress())
    return record.rows, record.states


def memory(place: DataLocation, config: Config) -> Outcome:
    """What two steps need of a GPU and of a processor, and their arithmetic."""
    training_data, found = place.data(config), []
    for name in ("h100-80g-70g-free-x4", "cpu-8g"):
        hardware = machine(name)
        alone = config.replace(num_devices=1, dist_strategy="auto", dist_nnodes="1")
        plan = tried(plan_on, place, alone, training_data, hardware)
        if plan != REFUSED:
            memory_traces = MemoryTraces(config, training_data)
            trial = dataclasses.replace(step_settings(plan), compile=False)
            with mock.patch("lib.nn.activation_offload.SMALLEST_BYTES", 1):
                found.append(
                    (memory_traces.predictor(hardware)(trial), memory_traces.of(trial, hardware).step_flop)
                )
    return found


def shortage(place: DataLocation, config: Config) -> Outcome:
    """What becomes of a run whose memory runs out once."""
    made, record = job_of(place, config)
    failures = iter([torch.OutOfMemoryError("out of memory")])

    class Short(Wrapped):
        def training(self, *arguments: Any) -> Any:
            for failure in failures:
                raise failure
            return super().training(*arguments)

    made.task = Short(made.task)
    with made.train_loader, made.eval_loader:
        loop.optimizer_step(made, Progress())
    return [plan.micro_batches for plan in record.plans]


def launch(place: DataLocation, config: Config) -> Outcome:
    """What several processes and machines are told, and the files for schedulers."""
    found = [tried(launched, place, config, machine(name)) for name in MACHINES]
    name, folder = "name", Path("/folder")
    with mock.patch.object(cluster, "probe", machine_of):
        found.append(tried(cluster.command_line, config, name=name, runs=folder))
    of_slurm = partial(cluster.script_of, configuration="", folder=folder, runs=folder)
    given = {"image": "image", "storage": "storage", "accelerator": "gpu"}
    of_ray = partial(cluster.file_of, to="ray", name=name, configuration="", given=given)
    return *found, tried(of_slurm, config), tried(of_ray, config)


def files(place: DataLocation, config: Config) -> Outcome:
    """What a run leaves: files by kind and checkpoints; what sinks are told; whether it is resumed."""
    runs, storage = (place.root / name for name in ("runs", "storage"))
    for folder in (runs, storage):
        emptied(folder)
    requested, told = place.request(config), list[Any]()
    with services(told), silence():
        check_packages(config)
        upload.check_storage(config)
        training_data = place.data(config)
        plan, hardware = plan_here(place, config, training_data)
        prepared = commands.PlannedRun(request=requested, data=training_data, hardware=hardware, plan=plan)
        commands._train_as_rank_0(prepared, Backend("cpu"), None)
        with (
            mock.patch.object(RunDir, "find_interrupted", lambda *_, **__: "the run"),
            mock.patch.object(upload, "interrupted", lambda *_, **__: "the run"),
        ):
            found = commands._to_resume(requested, None)
    written = sorted(
        anonymous(path.relative_to(place.root)) for folder in (runs, storage) for path in folder.rglob("*")
    )
    return written, told, found


def between_nodes(place: DataLocation, config: Config) -> Outcome:
    """What replicas on two nodes wait longer for each other than on one, by estimate."""
    training_data, found = place.data(config), list[float]()
    predict = partial(needed, data=training_data)
    for per_node in (4, 2):
        hardware = dataclasses.replace(machine("h100-80g-70g-free-x4"), per_node=per_node)
        ddp, *_ = compare_strategies(config, hardware, training_data.facts, predict=predict)
        found.append(ddp.seconds[0] if ddp.seconds else 0.0)
    return found[1] - found[0]


WITNESSES: tuple[Witness, ...] = (
    tiers, model, plans, data, job, checkpoint_formats, training, shortage, launch, files, data_nowhere,
    data_damaged, memory, between_nodes,
)  # fmt: skip
