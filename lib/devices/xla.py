"""Backend for XLA devices by torch_xla (up to 2.9), never run on TPU hardware.

Execution is lazy: operations are recorded, and compiled and executed together at `mark_step`. Gradients are
averaged explicitly and once; `optimizer_step` of torch_xla would average them a second time.

`python -m lib.devices.xla` prints the devices, for callers that must neither acquire nor wait for them.
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
import torch_xla.debug.metrics as xla_metrics
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from lib.devices.base import Backend, DistributedBackend, host_copy
from lib.plan.types import Kind, Precision


class XlaBackend(Backend):
    """Backend of a run with one process on one XLA device."""

    def __init__(
        self, kind: Kind = "xla", *, rank: int = 0, world: int = 1, local_rank: int = 0, devices: int = 1
    ) -> None:
        super().__init__(kind, rank=rank, world=world, local_rank=local_rank, devices=devices)
        self._join_devices()
        self.device = torch_xla.device()

    def _join_devices(self) -> None:
        """Join the collective runtime of several devices, before the first of them is opened."""

    def configure_products(self, precision: Precision) -> None:
        """Set the precision of matrix products; by default a TPU rounds fp32 factors to bf16."""
        torch_xla.backends.set_mat_mul_precision("highest" if precision == "fp32" else "default")

    def mark_step(self) -> None:
        """Compile and execute the recorded operations."""
        torch_xla.sync()

    def synchronize(self) -> None:
        """Execute the recorded operations and wait for them."""
        torch_xla.sync(wait=True)

    def compilations(self, *, compiled: bool) -> dict[str, float]:  # noqa: ARG002
        """Return the graphs that this process has compiled, and their seconds, as torch_xla counts them."""
        found = xla_metrics.metric_data("CompileTime")  # None before the first
        count, nanoseconds = found[:2] if found else (0, 0)
        return {"compilations": count, "compile_seconds": nanoseconds / 1e9}

    def to_host(self, value: Any) -> Any:
        """Copy the tensors of a state to the CPU."""
        # Not the `save` of torch_xla, which writes by itself, on the first process of every node.
        return host_copy(value)


class DistributedXlaBackend(XlaBackend, DistributedBackend):
    """Backend of one of several processes with a device each. Ranks are those of the environment.

    Devices are numbered in an order of their own, so the only collective on them is a sum.
    """

    def _join_devices(self) -> None:
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers the xla:// rendezvous

        self.serve_store()
        # The xla:// rendezvous assigns this process one of its node's devices.
        _, _, world = next(iter(rendezvous("xla://")))
        assert world == self.world, f"there are {world} XLA devices for {self.world} processes"

    def wrap(self, model: nn.Module, *, share_buffers: bool) -> nn.Module:  # noqa: ARG002
        """Load rank 0's weights into `model`; `average_gradients` averages its gradients."""
        model.load_state_dict(self.broadcast(self.to_host(model.state_dict()) if self.is_main else None))
        return model

    def without_gradient_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a null context: backward passes never sync gradients here."""
        return contextlib.nullcontext()

    def average_gradients(self, model: nn.Module) -> None:
        """Average gradients over devices with one all-reduce."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        xla_model.all_reduce(xla_model.REDUCE_SUM, gradients, scale=1 / self.world)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum `tensor` over devices, in place."""
        tensor.copy_(xla_model.all_reduce(xla_model.REDUCE_SUM, tensor))


def main() -> int:
    """Print the devices as JSON: name, total_bytes and free_bytes; None where not reported."""
    print(json.dumps([_described(device) for device in torch_xla.devices()]))
    return 0


def _described(device: torch.device) -> dict[str, Any]:
    name = xla_model.xla_device_hw(device)
    if name == "CPU":  # torch_xla's CPU device, for trials; it has main memory
        return {"name": name, "total_bytes": None, "free_bytes": None}
    memory = xla_model.get_memory_info(device)
    free_bytes = memory["bytes_limit"] - memory["bytes_used"]
    return {"name": name, "total_bytes": memory["bytes_limit"], "free_bytes": free_bytes}


if __name__ == "__main__":
    sys.exit(main())
