"""The part of the seam to devices that needs torch_xla (up to 2.9): TPUs, on which it was never run.

Operations on such a device are collected, and compiled and carried out together at `mark_step`. Gradients
are averaged here by name and once: `optimizer_step` of torch_xla would do so a second time, unasked.

`python -m lib.devices.xla` prints the devices, for a process that must neither take them nor wait for them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import torch
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xla_model
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from lib.devices.base import Backend, DistributedBackend, host_copy
from lib.plan.types import Kind, Precision


class XlaBackend(Backend):
    """A run of one process on one XLA device."""

    def __init__(
        self, kind: Kind = "xla", *, rank: int = 0, world: int = 1, local_rank: int = 0, devices: int = 1
    ) -> None:
        super().__init__(kind, rank=rank, world=world, local_rank=local_rank, devices=devices)
        self._join_devices()
        self.device = torch_xla.device()

    def _join_devices(self) -> None:
        """Take part in what several devices do together. Before the first of them is opened."""

    def configure_products(self, precision: Precision) -> None:
        # A TPU would round the factors of single precision to bf16.
        torch_xla.backends.set_mat_mul_precision("highest" if precision == "fp32" else "default")

    def mark_step(self) -> None:
        torch_xla.sync()

    def synchronize(self) -> None:
        torch_xla.sync(wait=True)

    def to_host(self, value: Any) -> Any:
        # Not the `save` of torch_xla: it writes by itself, on the first process of every machine.
        return host_copy(value)


class DistributedXlaBackend(XlaBackend, DistributedBackend):
    """One of several processes with a device each. Ranks are those of the environment.

    Devices number themselves in an order of their own, so all they do together is to add up.
    """

    def _join_devices(self) -> None:
        import torch_xla.distributed.xla_backend  # noqa: F401 - makes torch know the address below

        self.serve_store()
        # Who asks for that address is given one of the devices of its machine.
        _, _, world = next(iter(rendezvous("xla://")))
        assert world == self.world, f"there are {world} XLA devices for {self.world} processes"

    def wrap(self, model: nn.Module, *, share_buffers: bool) -> nn.Module:  # noqa: ARG002
        """`model` with the weights of rank 0; its gradients are averaged by `average_gradients`."""
        model.load_state_dict(self.broadcast(self.to_host(model.state_dict()) if self.is_main else None))
        return model

    def without_gradient_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        return contextlib.nullcontext()

    def average_gradients(self, model: nn.Module) -> None:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        xla_model.all_reduce(xla_model.REDUCE_SUM, gradients, scale=1 / self.world)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        tensor.copy_(xla_model.all_reduce(xla_model.REDUCE_SUM, tensor))


def main() -> int:
    """Print the devices as JSON: name, total_bytes and free_bytes; None where they do not tell."""
    print(json.dumps([_described(device) for device in torch_xla.devices()]))
    return 0


def _described(device: torch.device) -> dict[str, Any]:
    name = xla_model.xla_device_hw(device)
    if name == "CPU":  # which torch_xla has for trying out; its memory is the processor's
        return {"name": name, "total_bytes": None, "free_bytes": None}
    memory = xla_model.get_memory_info(device)
    free_bytes = memory["bytes_limit"] - memory["bytes_used"]
    return {"name": name, "total_bytes": memory["bytes_limit"], "free_bytes": free_bytes}


if __name__ == "__main__":
    sys.exit(main())
