"""Runs for witnesses to look at: plans, jobs and launches, with machines and services that are not here."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import pytest
import torch

from lib.config import Config
from lib.data.types import Part
from lib.devices.base import Backend
from lib.errors import ToolkitError
from lib.kconf import Resolved
from lib.plan.fitting import GAPS, StepSettings
from lib.plan.probe_search import Measurement, Probed
from lib.plan.sharding import shares
from lib.plan.types import Hardware, Layout, Plan
from tests.support.configs import load_hardware
from tests.support.event_files import use_stand_in
from tests.support.training import MemoryRecord
from train import commands, multi_node
from train.build import make_job
from train.initial_weights import initial_weights
from train.job import Job
from train.planning import autotune, run_plan
from train.planning.run_plan import RunRequest, plan_for
from train.training_data import TrainingData, open_training_data

Outcome: TypeAlias = Any


MACHINES = ("cpu-8g", "cpu-24g-avx512", "tpu-v4-8", "m2-max", "a10g", "rtx2060-6g-x8", "h100-80g-70g-free-x4")
REFUSED = "refused"
_FIELDS = [field.name for field in dataclasses.fields(Config)]
_OF_SUBJECTS = (*_FIELDS[: _FIELDS.index("tier")], "seed", "grad_checkpoint")
# Of a model for which memory is short on the small machines, alone or on several of their devices, and not on
# the large ones.
SAMPLE_BYTES, WEIGHT_BYTES = 500_000_000, 800_000_000


@dataclasses.dataclass(frozen=True)
class DataLocation:
    """A source tree of its own, where the data of tests are."""

    root: Path
    subjects: dict[Any, TrainingData] = dataclasses.field(default_factory=dict)

    def data(self, config: Config) -> TrainingData:
        """Of all that Config has before the tier, and what else a model is built by."""
        key = repr([getattr(config, name) for name in _OF_SUBJECTS])
        if key not in self.subjects:
            self.subjects[key] = open_training_data(config, root=self.root, log=say_nothing)
        return self.subjects[key]

    def request(self, config: Config, *, runs: str = "runs") -> RunRequest:
        resolved = Resolved(
            values={"MODEL": config.model}, in_effect={}, origins={}, given={}, text="", minimal=""
        )
        return RunRequest(
            resolved=resolved, config=config, root=self.root, runs=self.root / runs, started=0.0
        )


@cache
def machine(name: str) -> Hardware:
    """One of tests/fixtures/hardware; of the small GPUs a part is in use.

    What is free there is midway between what `needed` takes of ZeRO-1 (81 %) and of DDP (87 %).
    """
    found = load_hardware(name)
    if name != "rtx2060-6g-x8":
        return found
    return dataclasses.replace(
        found,
        devices=tuple(dataclasses.replace(d, free_bytes=d.total_bytes * 84 // 100) for d in found.devices),
    )


@contextlib.contextmanager
def silence() -> Iterator[None]:
    with Path("/dev/null").open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def say_nothing(_: str) -> None:
    pass


def tried(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except ToolkitError:
        return REFUSED


def first_rows(part: Part) -> tuple[int, str]:
    inputs, targets = part.take(np.arange(min(part.size, 4)) * part.stride)
    content = hashlib.sha256(np.ascontiguousarray(inputs).tobytes() + np.ascontiguousarray(targets).tobytes())
    return part.size, content.hexdigest()


def needed(trial: StepSettings, *, data: TrainingData) -> dict[str, int]:
    """In place of a simulation, which `memory` makes: bytes that go with samples and weights."""
    assert data.facts.units is not None
    layout = trial.layout or Layout(strategy="single", world=1, shard=1)
    parts = {"parameters": WEIGHT_BYTES, "gradients": WEIGHT_BYTES, "optimizer": 2 * WEIGHT_BYTES}
    shared = shares(data.facts.units, layout)
    half = 1 if trial.precision == "fp32" else 2
    activations = SAMPLE_BYTES * trial.micro_batch // half
    return {name: round(size * shared.get(name, 1)) for name, size in parts.items()} | {
        "activations": activations,
        GAPS: 0,
    }


def plan_on(place: DataLocation, config: Config, data: TrainingData, hardware: Hardware) -> Plan:
    facts = dataclasses.replace(data.facts, bytes_per_sample=SAMPLE_BYTES)
    probed = Probed(
        measurements=(Measurement(micro_batch=2, need_bytes=1, samples_per_second=1),), failures=()
    )
    predictor = SimpleNamespace(predictor=lambda _: partial(needed, data=data))
    with (
        mock.patch.object(run_plan, "MemoryTraces", lambda *_: predictor),
        mock.patch.object(autotune, "ProbeTarget"),
        mock.patch.object(autotune, "cached_or_measured", lambda _: probed),
        mock.patch.object(run_plan, "show"),
        silence(),
    ):
        return plan_for(place.request(config), dataclasses.replace(data, facts=facts), hardware, None)


def planned(place: DataLocation, config: Config, data: TrainingData, hardware: Hardware) -> Outcome:
    plan = plan_on(place, config, data, hardware).to_json()
    return {name: value for name, value in plan.items() if name not in ("reasons", "memory", "target")}


def plan_here(
    place: DataLocation, config: Config, data: TrainingData, *, free_bytes: int | None = None
) -> tuple[Plan, Hardware]:
    """The plan of one device of a machine that will do, to be carried out by a processor in its place."""
    alone = config.replace(num_devices=1, dist_strategy="auto", dist_nnodes="1")
    for name in reversed(MACHINES):
        hardware = machine(name)
        plan = tried(plan_on, place, alone, data, hardware)
        if plan != REFUSED:
            break
    else:
        raise ToolkitError("no machine will do")
    hardware = dataclasses.replace(hardware, cpu_count=2)  # so many threads are started
    if free_bytes is not None:
        devices = (dataclasses.replace(hardware.devices[0], free_bytes=free_bytes),)
        hardware = dataclasses.replace(hardware, devices=devices)
    eager: dict[str, Any] = {"compile": False, "compile_parts": (), "cuda_graphs": False}
    return dataclasses.replace(plan, device="cpu", precision="fp32", **eager), hardware


def job_of(place: DataLocation, config: Config, *, free_bytes: int | None = None) -> tuple[Job, Remembering]:
    data = place.data(config)
    plan, hardware = plan_here(place, config, data, free_bytes=free_bytes)
    record = Remembering()
    made = make_job(
        config,
        plan,
        data,
        hardware=hardware,
        backend=Backend("cpu"),
        record=record,
        weights=initial_weights(config, place.root),
        whole_run=True,
    )
    return made, record


class Remembering(MemoryRecord):
    """Remembers digests of states, and who kept them."""

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:
        self.states[step] = (best, threading.current_thread() is threading.main_thread(), _digest(state))  # type: ignore[assignment]


def _digest(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.detach().double().numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return {name: _digest(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_digest(part) for part in value]
    return value


class _Launched(Exception):
    """What a launch was told."""


def launched(place: DataLocation, config: Config, hardware: Hardware) -> Outcome:
    """What becomes of a run that is started on `hardware`: its processes, or none besides this one."""

    def caught(*_: object, **told: object) -> None:
        raise _Launched({name: value for name, value in told.items() if name not in ("arguments", "plan")})

    data = place.data(config)
    with (
        mock.patch.object(commands, "open_training_data", lambda *_, **__: data),
        mock.patch.object(commands, "plan_for", lambda *_, **__: plan_on(place, config, data, hardware)),
        mock.patch.object(commands, "probe", lambda _: hardware),
        mock.patch.object(multi_node, "probe", lambda _: hardware),
        mock.patch.object(run_plan, "probe", lambda _: hardware),
        mock.patch.object(commands, "launch", caught),
        mock.patch.object(multi_node, "launch", caught),
        mock.patch.object(commands, "_train_as_rank_0", caught),
        mock.patch.object(commands, "Backend"),
        silence(),
    ):
        try:
            return commands._plan_and_train(place.request(config))
        except _Launched as told:
            return told.args


def machine_of(device: str) -> Hardware:
    kinds = {"cuda": "h100-80g-70g-free-x4", "mps": "m2-max", "xla": "tpu-v4-8", "cpu": "cpu-8g"}
    return load_hardware(kinds.get(device, "h100-80g-70g-free-x4"))


def emptied(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def anonymous(path: Path) -> str:
    return "/".join("RUN" if part.startswith("20") else part for part in path.parts)


@contextlib.contextmanager
def services(told: list[Any]) -> Iterator[None]:
    """wandb and trackio that record what they receive, and a tensorboard that writes JSON."""

    class Service(ModuleType):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.__spec__ = ModuleSpec(name, None, origin="here")

        def init(self, **named: Any) -> Any:
            told.append((self.__name__, {k: v for k, v in named.items() if k in ("project",)}))
            return mock.MagicMock()

        def __getattr__(self, name: str) -> Any:
            return mock.MagicMock()

    fakes = {name: Service(name) for name in ("wandb", "trackio")}
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(sys.modules, fakes):
        use_stand_in(patch)
        yield
