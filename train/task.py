"""What one kind of learning must say to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lib.data.loader import Batch

Forward = Callable[..., Any]  # a module, perhaps wrapped or compiled


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over one micro-batch. Means are taken by the loop, over the global count.

    A mean of micro-batch means would weigh the samples of a small micro-batch more.
    """

    loss: Tensor  # scalar, differentiable in training
    count: Tensor | int  # what the loss is a sum over; an int counts samples, known without the device
    metrics: Mapping[str, Tensor]  # further sums over `count`, without gradient


class Task(Protocol):
    """One kind of learning: classification, language modelling, ..."""

    metric: str  # of evaluation; a larger one is better

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """The objective on one micro-batch."""

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """The same without regularisation; each row counts `batch.weights` times."""
