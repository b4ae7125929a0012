"""Tasks: their interfaces to the training loop, and those of train/tasks, found by model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import Dataset, Spec
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.nn.model_code import load_model
from lib.plan.types import WITHOUT_DOUBLE, Branch, Plan
from lib.plugins import MODELS, TASKS

Forward = Callable[..., Any]  # a module, perhaps wrapped or compiled


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over one micro-batch; the loop divides by the global count, so all samples weigh the same."""

    loss: Tensor  # scalar, differentiable in training
    count: Tensor | int  # number of summands; an int needs no synchronization with the device
    metrics: Mapping[str, Tensor]  # further sums, without gradient


def count_of(batch: Batch) -> Tensor | int:
    """Return the number of rows that are samples."""
    return len(batch.inputs) if batch.weights is None else batch.weights.sum()


def weighted_sum(values_N: Tensor, batch: Batch) -> Tensor:
    """Sum one value per row, without padding."""
    return values_N.sum() if batch.weights is None else (values_N * batch.weights).sum()


class Totals:
    """Sums that stay on the device until they are read, which synchronizes."""

    def __init__(self) -> None:
        self._parts: list[Sums] = []

    def add(self, sums: Sums) -> None:
        """Add the sums of a micro-batch, detached, so that its graph is freed."""
        self._parts.append(Sums(sums.loss.detach(), sums.count, sums.metrics))

    def means(self, backend: Backend) -> dict[str, float]:
        """Return the means over all ranks, and the global count as "count"."""
        # Sums over an evaluation exceed the precision of float32, but some devices lack float64.
        dtype = torch.float32 if backend.kind in WITHOUT_DOUBLE else torch.float64
        first = self._parts[0]
        names = ["loss", *first.metrics]
        counts = [part.count for part in self._parts]
        host = sum(count for count in counts if isinstance(count, int))
        columns = [
            [torch.tensor(host, device=first.loss.device), *(c for c in counts if isinstance(c, Tensor))],
            [part.loss for part in self._parts],
            *([part.metrics[name] for part in self._parts] for name in names[1:]),
        ]
        packed = torch.stack([torch.stack(column).to(dtype).sum() for column in columns])
        backend.all_reduce_sum(packed)
        total, *sums = packed.tolist()
        return {"count": total} | {name: value / total for name, value in zip(names, sums, strict=True)}


class Task(Protocol):
    """A kind of learning: classification, language modelling, ..."""

    targets_per_sample: int  # `Sums.count` per sample if it is an int

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the training loss of one micro-batch; `batch.weights` are of its rows, None for all 1."""

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss without regularisation; rows are weighted by `batch.weights`."""

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of an evaluation from its means; "count" comes first, named by its unit."""

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the score of a `report`; larger is better."""


class Carry(Protocol):
    """State of the rows of the effective batch between optimizer steps."""

    def seek(self, *, step: int, first: int, offset: int, count: int, rows: int) -> None:
        """Select the rows of the next micro-batch: `count` with samples, and padding up to `rows`."""

    def commit(self) -> None:
        """Keep the state of the finished step."""

    def discard(self) -> None:
        """Discard the state of an abandoned step."""

    def gathered(self, backend: Backend) -> dict[str, Tensor] | None:
        """Gather the state of all ranks for a checkpoint."""

    def load(self, state: Mapping[str, Tensor] | None, backend: Backend, *, shares: Sequence[int]) -> None:
        """Load the state of a checkpoint. shares: rows of each rank."""


@runtime_checkable
class Carries(Protocol):
    """A task whose samples stay for several steps."""

    @property
    def carry(self) -> Carry:
        """State of the rows."""


@runtime_checkable
class HoldsWeights(Protocol):
    """A task with frozen models."""

    def watch_weights(self, seen: Callable[[list[Tensor]], None]) -> None:
        """Call `seen` with the weights of the frozen models, and with each copy that training makes."""


class Prepared(Protocol):
    """Result of a task's preparation, such as pretrained frozen models."""

    def branches(self, build: Callable[[], torch.nn.Module], spec: Spec) -> tuple[Branch, Branch]:
        """Return the two branches for the planner; `build` makes the trained model."""

    def load(self, plan: Plan, backend: Backend, dtype: torch.dtype) -> Any:
        """Load onto the devices of the plan what the task's `build` takes as `prepared`."""


class TaskModule(Protocol):
    """Required definitions of train/tasks/NAME/task.py; `preparation_of` and others take optional ones."""

    Options: type[Any]  # a frozen dataclass; its fields are the task's own symbols
    DATA: tuple[str, tuple[type, ...]]  # data that it learns from: description and specs
    build: Callable[..., Task]  # takes Options and spec; keywords config, and prepared after a preparation
    fault: Callable[..., str]  # takes what a model returns, the spec and rows: the fault, or ""


def load_task(config: Config) -> TaskModule:
    """Load the configured task. Raises ConfigError if it or the model's file is invalid."""
    load_model(config.model)
    return cast(TaskModule, TASKS.load(config.task))


def make_task(config: Config, spec: Spec, *, prepared: Any = None) -> Task:
    """Build the configured task. prepared: from `Prepared.load`, for a task with a preparation."""
    module = load_task(config)
    options = TASKS.options(config.task, config.task_options)
    given = {} if preparation_of(config) is None else {"prepared": prepared}
    return module.build(options, spec, config=config, **given)


def _optional(config: Config, name: str) -> Callable[..., Any] | None:
    """Return a function that the task may define, None if it does not."""
    return vars(load_task(config)).get(name)


def preparation_of(config: Config) -> Callable[..., Prepared] | None:
    """Return the preparation of the task, None if it has none.

    It takes configuration, data set, root, learned (false for random weights) and log.
    """
    return _optional(config, "prepare")


def to_measure(config: Config) -> Config:
    """Return `config` with the cheapest options of its task that need the same memory."""
    shorten = _optional(config, "to_measure")
    return config if shorten is None else config.replace(task_options=shorten(config.task_options))


def baseline_of(
    config: Config, dataset: Dataset, *, cache_dir: Path, log: Callable[[str], None]
) -> str | None:
    """Return the baseline of the task as a line of text, cached in `cache_dir`; None if there is none.

    Raises ToolkitError if the cache cannot be written.
    """
    baseline = _optional(config, "baseline")
    return None if baseline is None else baseline(dataset, cache_dir=cache_dir, log=log)


def naive_loss_of(config: Config, spec: Spec) -> float | None:
    """Return the expected loss of an untrained model; None if its task cannot tell."""
    naive_loss = _optional(config, "naive_loss")
    return None if naive_loss is None else naive_loss(spec)


def check_options(config: Config) -> None:
    """Raise ConfigError if a symbol of the task is hidden because the model's Kconfig does not select it."""
    hidden = [name for name, value in config.task_options.items() if value is None]
    if hidden:
        place = MODELS.place(config.model)
        raise ConfigError(
            f'{place}/model.py: TASK = "{config.task}" has no CONFIG_{hidden[0].upper()}',
            todo=f"select {vars(load_task(config))['SELECTS']} in {place}/Kconfig",
        )


def refuse_label_smoothing(config: Config, predicts: str) -> None:
    """Raise ConfigError if label smoothing is requested of a task without labels."""
    if config.label_smoothing:
        raise ConfigError(
            f"CONFIG_LABEL_SMOOTHING={config.label_smoothing:g} is for labels",
            why=f"{config.model} predicts {predicts}",
            todo="leave it at 0",
        )


def no_logits(returned: Any, before: tuple[int, ...], classes: int) -> str:
    """Return the fault if `returned` is no floating-point (*before, >= classes) tensor, else ""."""
    shaped = (
        isinstance(returned, Tensor) and returned.is_floating_point() and returned.dim() == len(before) + 1
    )
    if shaped and tuple(returned.shape[:-1]) == before and returned.shape[-1] >= classes:
        return ""
    return f"not logits {(*before, classes)}"
