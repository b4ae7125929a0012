"""What one kind of learning must say to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lib.config import Config
from lib.data.loader import Batch
from lib.data.types import Dataset, Spec
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.nn.stablemax import WITHOUT_DOUBLE
from lib.plan.types import Branch, Plan

Forward = Callable[..., Any]  # a module, perhaps wrapped or compiled


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over one micro-batch. Means are taken by the loop, over the global count.

    A mean of micro-batch means would weigh the samples of a small micro-batch more.
    """

    loss: Tensor  # scalar, differentiable in training
    count: Tensor | int  # what the loss is a sum over; an int is known without the device
    metrics: Mapping[str, Tensor]  # further sums over `count`, without gradient


class Totals:
    """Sums on the device, taken together when they are read: that makes the device finish its work."""

    def __init__(self) -> None:
        self._parts: list[Sums] = []

    def add(self, sums: Sums) -> None:
        # Without the graph that made it: its tensors would live as long as the sum.
        self._parts.append(Sums(sums.loss.detach(), sums.count, sums.metrics))

    def means(self, backend: Backend) -> dict[str, float]:
        """Means over all ranks' counts, on the host; also the count itself."""
        # Sums over a whole evaluation outgrow fp32, which is all that some devices have.
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
    """One kind of learning: classification, language modelling, ..."""

    targets_per_sample: int  # what `Sums.count` counts in a sample where it is an int

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """The objective on one micro-batch."""

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """The same without regularisation; each row counts `batch.weights` times."""

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """An evaluation as it is told, from its means and their "count", which comes first by its unit."""

    def score(self, evaluation: Mapping[str, float]) -> float:
        """How good a `report` is: a larger one is better."""


class Carry(Protocol):
    """What rows of the effective batch keep from one optimizer step to the next, where samples stay."""

    def seek(self, *, step: int, first: int, offset: int, count: int) -> None: ...

    def commit(self) -> None: ...

    def discard(self) -> None: ...

    def gathered(self, backend: Backend) -> dict[str, Tensor] | None: ...

    def load(self, state: Mapping[str, Tensor] | None, backend: Backend, *, share: int) -> None: ...


@runtime_checkable
class Carries(Protocol):
    """A task whose samples stay for several steps."""

    @property
    def carry(self) -> Carry: ...


@runtime_checkable
class HoldsWeights(Protocol):
    """A task with models of its own that are not trained."""

    def weights(self) -> list[Tensor]: ...


class Prepared(Protocol):
    """What a task has made before the first job, such as models that are trained and then frozen."""

    def branches(self, build: Callable[[], torch.nn.Module], spec: Spec) -> tuple[Branch, Branch]:
        """What planning has to know of it; `build` makes the model that is trained."""

    def load(self, plan: Plan, backend: Backend, dtype: torch.dtype) -> Any:
        """What the task's `build` is given, on the devices of the plan."""


class TaskModule(Protocol):
    """What train/tasks/NAME/task.py must define; `train/tasks/opening.py` has what it may define besides."""

    Options: type[Any]  # a frozen dataclass; its fields are the task's own symbols
    DATA: tuple[str, tuple[type, ...]]  # what it learns from, in words and by what a model is told of it
    build: Callable[..., Task]  # of Options and the spec; by name config, and prepared where there is any
    fault: Callable[..., str]  # of what a model returns, the spec and rows: why it is no use, "" where it is


class Prepare(Protocol):
    """An optional function of a task module: what must be made once, before any job."""

    def __call__(
        self, config: Config, dataset: Dataset, *, root: Path, learned: bool, say: Callable[[str], None]
    ) -> Prepared: ...


def refuse_label_smoothing(config: Config, predicts: str) -> None:
    """Raise ConfigError where label smoothing is asked of a task without labels."""
    if config.label_smoothing:
        raise ConfigError(
            f"CONFIG_LABEL_SMOOTHING={config.label_smoothing:g} is for labels",
            why=f"{config.model} predicts {predicts}",
            todo="leave it at 0",
        )


def no_logits(returned: Any, before: tuple[int, ...], classes: int) -> str:
    """Why `returned` is no (*before, at least `classes`) of floating-point numbers; "" where it is."""
    shaped = (
        isinstance(returned, Tensor) and returned.is_floating_point() and returned.dim() == len(before) + 1
    )
    if shaped and tuple(returned.shape[:-1]) == before and returned.shape[-1] >= classes:
        return ""
    return f"not logits {(*before, classes)}"


def full_precision(logits: Tensor) -> Tensor:
    """Autocast leaves logits in half precision, too coarse for a softmax."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
