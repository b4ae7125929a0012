"""A model with its training loss, of which torch.compile makes one graph."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn

from lib.data.loader import Batch
from train.tasks.base import Task

_Fields: TypeAlias = tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None]


class LossInModel(nn.Module):
    """`model`, which returns fields of `Task.training`'s `Sums` where it is called with those of a batch.

    DistributedDataParallel wraps it in place of the model, as it would be a break between the two in a graph.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self._training = model, task.training

    def forward(self, *arguments: Any, batch: _Fields | None = None) -> Any:
        """Return what the model makes of `arguments`, or loss, count and metrics of a batch."""
        if batch is None:
            return self.model(*arguments)
        sums = self._training(self.model, Batch(*batch))
        return sums.loss, sums.count, dict(sums.metrics)
