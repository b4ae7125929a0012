"""What one kind of learning must say to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.devices.base import Backend
from lib.nn.stablemax import WITHOUT_DOUBLE

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


def full_precision(logits: Tensor) -> Tensor:
    """Autocast leaves logits in half precision, too coarse for a softmax."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
