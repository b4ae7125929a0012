"""Small jobs for tests of training: random images in memory, narrow networks, records that remember."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from lib.config import Config
from lib.data import ArrayPart, Dataset, ImageSpec
from lib.data.loader import Batch
from lib.data.types import TextSpec, TokenPart
from lib.devices.base import Backend
from lib.plan.fitting import StepSettings
from lib.plan.types import Hardware, Plan
from tests.support.configs import make_config
from tests.support.simulated import make_training_data
from train.build import make_job
from train.job import Job, Progress
from train.loop import train
from train.record import Record
from train.tasks.base import Forward, HasRowFigures, Sums, Task
from train.training_data import TrainingData

CLASSES = 10
# Of every linear layer but a head, with all that adapters have.
ADAPTERS: dict[str, Any] = {
    "adapt": "lora",
    "lora_rank": 2,
    "lora_alpha": 3,
    "lora_dropout": 0.25,
    "lora_targets": "all-linear",
    "lora_train": "",
    "freeze": None,
}
CPU = Hardware.from_json(
    {
        "kind": "cpu",
        "devices": [{"name": "cpu", "total_bytes": 16 * 10**9, "free_bytes": 16 * 10**9, "capability": None}],
        "cpu_name": "cpu",
        "cpu_count": 1,
        "cpu_bf16": "none",
    }
)
CPU_TRIAL = StepSettings(
    device="cpu",
    several_devices=False,
    micro_batch=8,
    accumulates=True,
    norm_batch=0,
    precision="fp32",
    channels_last=False,
    compile=False,
)


def random_data(
    config: Config, *, shape: tuple[int, int, int], train_size: int, test_size: int | None = None
) -> TrainingData:
    """Random images (C, H, W) and labels; without `test_size` the same for training and evaluation."""
    random = torch.Generator().manual_seed(0)

    def part(size: int) -> ArrayPart:
        images = torch.randint(0, 256, (size, *shape), generator=random, dtype=torch.uint8)
        return ArrayPart(images.numpy(), torch.randint(0, CLASSES, (size,), generator=random).numpy())

    channels, height, width = shape
    mean, std = (0.5,) * channels, (0.25,) * channels
    spec = ImageSpec.square("random", height, CLASSES, mean=mean, std=std, synthetic=True)
    spec = dataclasses.replace(spec, width=width)
    train_part = part(train_size)
    test_part = train_part if test_size is None else part(test_size)
    return make_training_data(config, Dataset(spec=spec, train=train_part, test=test_part, source="random"))


def data_of(config: Config) -> TrainingData:
    """Random images, or random tokens where `config` has a block size."""
    if config.block_size is None:
        shape = (3, 32, 32) if config.model.startswith("resnet") else (1, 28, 28)
        return random_data(config, shape=shape, train_size=64)
    random = np.random.default_rng(0)
    parts = [
        TokenPart(random.integers(0, 50, 4000).astype(np.uint8), config.block_size, shifted=shifted)
        for shifted in (True, False)
    ]
    spec = TextSpec(
        name="random", vocab_size=50, block_size=config.block_size, unit="byte", validation_tokens=3999,
        validation_bytes=3999,
    )  # fmt: skip
    return make_training_data(config, Dataset(spec=spec, train=parts[0], test=parts[1], source="random"))


def small_config(model: str = "lenet5", **changes: Any) -> Config:
    """Three steps of SGD with momentum; a residual network is four channels wide at its narrowest."""
    settings: dict[str, Any] = {
        "optimizer": "sgd",
        "momentum": 0.9,
        "learning_rate": 0.05,
        "schedule": "constant",
        "warmup_pct": 0,
        "budget": "steps",
        "max_steps": 3,
        "channels_last": False,
        "num_workers": 1,
        "checkpoint_seconds": 0,
    }
    config = make_config(model)
    if "width" in config.model_options:
        narrow = {"width": 8 if model.startswith("resnet") else 4, "heads": 2, "layers": 2}
        settings |= {"model_options": {n: narrow.get(n, v) for n, v in config.model_options.items()}}
    return config.replace(**(settings | changes))


def small_plan(
    *micro_batches: int, world: int = 1, norm_batch: int = 0, precision: str = "fp32", **changes: Any
) -> Plan:
    """A plan of the first device's micro-batches, for example `small_plan(8, 8, 4)`."""
    effective = changes.get("effective_batch", sum(micro_batches) * world)
    settings: dict[str, Any] = {
        "device": "cpu",
        "world": world,
        "strategy": "ddp" if world > 1 else "single",
        "shard": 1,
        "branch_devices": (1, 1) if changes.get("strategy") == "split" else (),
        "micro_batch": micro_batches[0],
        "accumulation": len(micro_batches),
        "last_micro_batch": micro_batches[-1],
        "effective_batch": effective,
        "target": effective,
        "norm_batch": norm_batch,
        "precision": precision,
        "channels_last": False,
        "compile": False,
        "compile_parts": ("model",) if changes.get("compile") else (),
        "cuda_graphs": False,
        "memory": None,
    } | changes
    return Plan(**settings, reasons=dict.fromkeys(settings, "a test wants it"))


class MemoryRecord(Record):
    """A record that remembers what it was told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.saved: list[tuple[int, bool]] = []  # step, best
        self.states: dict[int, Mapping[str, Any]] = {}
        self.plans: list[Plan] = []
        self.said: list[str] = []
        self.fractions: list[float] = []

    def log(self, text: str) -> None:
        self.said.append(text)

    def row(self, kind: str, **values: Any) -> None:
        self.rows.append({"kind": kind, **values})

    def progress(self, step: int, fraction: float) -> None:  # noqa: ARG002
        self.fractions.append(fraction)

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:
        self.saved.append((step, best))
        self.states[step] = clone(state)

    def replan(self, plan: Plan, why: str) -> None:
        self.plans.append(plan)
        self.said.append(why)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]


class Wrapped:
    """A task that does what another one does; tests override what they are about."""

    def __init__(self, task: Task) -> None:
        self.task, self.targets_per_sample = task, task.targets_per_sample

    def training(self, forward: Forward, batch: Batch) -> Sums:
        return self.task.training(forward, batch)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        return self.task.evaluation(forward, batch)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        return self.task.report(means)

    def score(self, evaluation: Mapping[str, float]) -> float:
        return self.task.score(evaluation)

    def row_figures(self, *rows: Tensor) -> dict[str, float]:
        return cast(HasRowFigures, self.task).row_figures(*rows)


def small_job(
    config: Config,
    plan: Plan,
    data: TrainingData,
    *,
    backend: Backend | None = None,
    record: Record | None = None,
    task: Callable[[Task], Task] = lambda task: task,
    dtype: torch.dtype = torch.float64,
) -> Job:
    """A job on the CPU; `task` wraps the one that the model's folder names."""
    backend, record = backend or Backend("cpu"), record or Record()
    job = make_job(config, plan, data, hardware=CPU, backend=backend, record=record, dtype=dtype)
    job.task = task(job.task)
    return job


def trained(job: Job) -> dict[str, Tensor]:
    """State of the model after the whole budget."""
    train(job, Progress())
    return job.model.state_dict()


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], *, only: str = "") -> float:
    """Over all tensors whose names contain `only`."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if only in name)


def clone(value: Any) -> Any:
    """A copy of nested dicts and lists that shares no tensor."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: clone(item) for key, item in value.items()}
    return [clone(item) for item in value] if isinstance(value, list | tuple) else value


class Clock:
    """What `time` is to the loop; nothing but a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("train.signals.time", self)

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class Timed(Wrapped):
    """A task that takes time. `signal_at`: the step during which a signal comes."""

    def __init__(
        self, task: Task, clock: Clock, *, step: float, evaluation: float = 0.0, signal_at: int = -1
    ) -> None:
        super().__init__(task)
        self.clock, self.step, self.evaluating, self.signal_at = clock, step, evaluation, signal_at
        self.trained = self.evaluated = 0

    def training(self, forward: Forward, batch: Batch) -> Sums:
        self.clock.now += self.step
        if self.trained == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        self.trained += 1
        return super().training(forward, batch)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        self.clock.now += self.evaluating
        self.evaluated += 1
        return super().evaluation(forward, batch)
