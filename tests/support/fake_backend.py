"""One rank of many in a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lib.devices.base import Backend


class FakeBackend(Backend):
    """Rank `rank` of `world` without the other ranks: collectives are recorded and change nothing."""

    def __init__(self, *, rank: int, world: int) -> None:
        super().__init__("cpu", rank=rank, world=world)
        self.calls: list[str] = []

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Record the call."""
        self.calls.append(f"sum{tuple(tensor.shape)}")

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Record the call and return `values`."""
        self.calls.append(f"max({len(values)})")
        return list(values)

    def broadcast(self, value: Any) -> Any:
        """Record the call and return `value`."""
        self.calls.append("broadcast")
        return value

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Record the call; on rank 0 return `tensor` for every rank."""
        self.calls.append(f"gather{tuple(tensor.shape)}")
        return [tensor.cpu()] * self.world if self.is_main else []
