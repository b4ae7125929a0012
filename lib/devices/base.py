"""Interface to devices and process groups.

A `Backend` is one process of a run: the device of its tensors, its rank among `world`, and the few
collectives that training needs. Code that needs torch_xla is in `lib.devices.xla`, code that needs torch_tpu
in `lib.devices.tpu`.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.distributed.fsdp import Gatherer, shard_model, single_replica
from lib.errors import ToolkitError
from lib.plan.types import PARTS_OF_STATE, Kind, Layout, Precision

if TYPE_CHECKING:
    from lib.distributed.gradient_wait import GradientWait

_COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


PINNED = {"cuda"}  # types of devices that copy from pinned main memory beside the host


def send(value: Tensor | npt.NDArray[Any] | float, device: torch.device) -> Tensor:
    """Copy `value` from main memory to `device`, to a GPU without waiting. What is there stays."""
    tensor = torch.as_tensor(value)
    # In a compiled graph it is a constant, which cannot be pinned.
    pinned = device.type in PINNED and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=pinned)


class Backend:
    """Backend of a run with one process. devices: number of GPUs; the first one, `device`, is the default."""

    def __init__(
        self, kind: Kind, *, rank: int = 0, world: int = 1, local_rank: int = 0, devices: int = 1
    ) -> None:
        self.kind = kind
        self.rank, self.world = rank, world
        self.local_world = world  # processes on this node
        numbers = range(devices * local_rank, devices * (local_rank + 1))
        self.device, *self._others = (self._device(kind, number) for number in numbers)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _device(self, kind: Kind, number: int) -> torch.device:
        """Return device `number` of this node."""
        return torch.device("cuda", number) if kind in ("cuda", "rocm") else torch.device(kind)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this process."""
        return self.device, *self._others

    @property
    def host(self) -> torch.device:
        """Device of tensors in main memory."""
        return torch.device("cpu")

    @property
    def is_main(self) -> bool:
        """True if this rank prints and writes files."""
        return self.rank == 0

    def wrap(self, model: nn.Module, *, share_buffers: bool) -> nn.Module:  # noqa: ARG002
        """Wrap `model` so that its backward pass averages gradients over ranks."""
        return model

    def shard(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Shard the weights of `model` and move it to the device of this rank."""
        raise AssertionError(f"{layout.strategy} is for several processes, and {type(model)} is in one")

    def without_gradient_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a context in which backward passes do not sync gradients (all but the last micro-batch)."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:  # noqa: ARG002
        """Run the backward pass of a micro-batch from `gradient` of `loss`. last: of its optimizer step."""
        torch.autograd.backward(loss, gradient)

    def waited_seconds(self) -> dict[str, float]:
        """Return seconds of waiting for other ranks so far, by column of metrics, where they are measured."""
        return {}

    def average_gradients(self, model: nn.Module) -> None:
        """Average gradients over ranks, where the backward pass of the wrapped model has not done so."""

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum `tensor` over ranks, in place."""

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over ranks of host numbers, the same on every rank."""
        return list(values)

    def begin_all_reduce_max(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin `all_reduce_max`; return the function that waits for its result."""
        reduced = self.all_reduce_max(values)
        return lambda: reduced

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` (any picklable object) on every rank."""
        return value

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather tensors of one shape from all ranks to rank 0, on the CPU; empty on other ranks."""
        return [tensor.cpu()]

    def gatherer(self, layout: Layout) -> Gatherer:  # noqa: ARG002
        """Return the gatherer of states sharded by `layout`; a collective of all ranks."""
        return Gatherer(rank=self.rank)

    def close(self) -> None:
        """Destroy the process group."""

    def autocast(self, precision: Precision) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context of forward passes; a null context for fp32."""
        if precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def loss_scaler(self, precision: Precision) -> torch.amp.GradScaler:
        """Return the gradient scaler: dynamic for fp16, disabled otherwise."""
        return torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")

    def configure_products(self, precision: Precision) -> None:
        """Set the precision of matrix products on the device, where `configure_numerics` does not."""

    def mark_step(self) -> None:
        """End a graph: a lazy device executes the recorded operations now."""

    def to_host(self, value: Any) -> Any:
        """Return the state `value` in a form that can be saved and loaded anywhere."""
        return value

    def synchronize(self) -> None:
        """Wait for the device, so that timings are valid."""
        if self.device.type == "cuda":
            for device in self.devices:
                torch.cuda.synchronize(device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def release_memory(self) -> None:
        """Return cached memory to the device after an out-of-memory error."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def compilations(self, *, compiled: bool) -> dict[str, float]:
        """Return columns of a row of metrics on compilation in this process, if the model is `compiled`."""
        if not compiled:
            return {}
        from torch._dynamo.utils import calculate_time_spent, counters

        graphs, seconds = counters["stats"]["unique_graphs"], calculate_time_spent()["total_wall_time"]
        return {"compilations": graphs, "compile_seconds": seconds}

    def peak_memory_bytes(self) -> int | None:
        """Peak bytes allocated by tensors, over the devices; None where it is not counted."""
        if self.device.type != "cuda":
            return None
        return max(torch.cuda.max_memory_allocated(device) for device in self.devices)

    def utilization(self) -> float | None:
        """Share of the driver's last sampling period in which the device was busy; None where it has none.

        Raises ToolkitError where the driver, or the package that asks it, is missing.
        """
        if self.device.type != "cuda":
            return None
        packages = (("pynvml", "NVMLError"), ("amdsmi", "AmdSmiException"))  # which torch imports if it can
        own = [getattr(sys.modules[name], error) for name, error in packages if name in sys.modules]
        try:
            return torch.cuda.utilization(self.device) / 100
        except (ImportError, RuntimeError, *own) as error:
            raise ToolkitError("the driver reports no device utilization", why=str(error)) from error


class DistributedBackend(Backend):
    """Backend of one of several processes, started by `launch`."""

    _gradient_wait: GradientWait | None = None  # where DDP averages gradients

    def __init__(self, kind: Kind, *, rank: int, world: int, local_rank: int, devices: int = 1) -> None:
        from lib.distributed.rank_stores import open_rank_store

        super().__init__(kind, rank=rank, world=world, local_rank=local_rank, devices=devices)
        # torch_xla has collectives of its own.
        name = "gloo" if kind == "xla" else dist.get_default_backend_for_device(self.device)
        store = open_rank_store(os.environ, rank=rank, world=world, timeout=_COLLECTIVE_TIMEOUT)
        options: dict[str, Any] = {"store": store, "rank": rank, "world_size": world}
        dist.init_process_group(name, timeout=_COLLECTIVE_TIMEOUT, **options)
        # Host decisions use a group of their own and never wait for the device.
        self._host_group = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
        self._gatherers: dict[int, Gatherer] = {}

    def wrap(self, model: nn.Module, *, share_buffers: bool) -> nn.Module:
        """Wrap `model` in DistributedDataParallel."""
        from lib.distributed.gradient_wait import GradientWait

        self._gradient_wait = GradientWait(self.device) if self.device.type in ("cpu", "cuda") else None
        ids = [self.device.index] if self.device.type == "cuda" else None
        # The older of the two names is deprecated (torch 2.13).
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {name: share_buffers}
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **options)

    def shard(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Shard the weights of `model` with fully_shard, in place."""
        shard_model(model, layout, device_type=self.device.type)
        return model

    def without_gradient_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return DDP's no_sync, or for sharded models a context that reduces within a replica only."""
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return single_replica(model)  # unsharded gradients would need the memory that sharding saves

    def backward(self, loss: Tensor, gradient: Tensor, *, last: bool) -> None:
        """Run a backward pass; time how long the last one of a step waits for DDP's reduction."""
        wait = self._gradient_wait if last else None
        with contextlib.nullcontext() if wait is None else wait.after(loss):
            super().backward(loss, gradient, last=last)

    def waited_seconds(self) -> dict[str, float]:
        """Return the seconds in which computed gradients waited for those of other ranks; not of FSDP's."""
        return {} if self._gradient_wait is None else {"gradient_wait": self._gradient_wait.seconds()}

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum `tensor` over ranks, in place."""
        dist.all_reduce(tensor)

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over ranks, through the host group."""
        return self.begin_all_reduce_max(values)()

    def begin_all_reduce_max(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin `all_reduce_max`; return the function that waits for its result."""
        tensor = torch.tensor(values, dtype=torch.float64)
        options: dict[str, Any] = {"op": dist.ReduceOp.MAX, "group": self._host_group, "async_op": True}
        work = dist.all_reduce(tensor, **options)

        def result() -> list[float]:
            work.wait()
            return [float(value) for value in tensor]

        return result

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank, through the host group."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._host_group)
        return box[0]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather tensors of one shape from all ranks to rank 0; empty on other ranks."""
        return Gatherer(self._host_group, rank=self.rank, ranks=self.world).gather(tensor)

    def gatherer(self, layout: Layout) -> Gatherer:
        """Return the gatherer of states sharded by `layout`; a collective that may create a process group."""
        if layout.strategy not in PARTS_OF_STATE:
            return super().gatherer(layout)
        ranks = self.world if layout.strategy == "zero1" else layout.shard  # those of the first replica
        if ranks not in self._gatherers:
            group = dist.new_group(list(range(ranks)), backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
            self._gatherers[ranks] = Gatherer(group, rank=self.rank, ranks=ranks)
        return self._gatherers[ranks]

    def serve_store(self) -> None:
        """Serve a store for libraries that look for one in the environment, on one interface only."""
        from lib.distributed.local_ranks import STORE_VARIABLE
        from lib.distributed.rank_stores import serve_at

        host = "127.0.0.1" if STORE_VARIABLE in os.environ else os.environ["MASTER_ADDR"]
        self._served = serve_at(host, 0, timeout=_COLLECTIVE_TIMEOUT) if self.is_main else None
        port = self.broadcast(self._served and self._served.port)
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is served here
        }

    def close(self) -> None:
        """Wait for all ranks and destroy the process groups."""
        dist.barrier(group=self._host_group)
        dist.destroy_process_group()


class SimulatedBackend(Backend):
    """Backend of a simulated device of `kind`, for `lib.memory.simulation`.

    averages_gradients: simulate other ranks, so that gradients live in DDP's buckets.
    devices: number of devices. Fake tensors of the second are on "cpu:1", and no operation mixes the two.
    """

    def __init__(self, kind: Kind, *, averages_gradients: bool, devices: int = 1) -> None:
        super().__init__("cpu")
        self.kind = kind
        self._others = [torch.device("cpu", number) for number in range(1, devices)]
        self._host = torch.device("cpu", devices)
        self._averages_gradients = averages_gradients
        self._buckets: list[Tensor] = []

    @property
    def host(self) -> torch.device:
        """Device of tensors in main memory, which the simulated device has no part of."""
        return self._host

    def wrap(self, model: nn.Module, *, share_buffers: bool) -> nn.Module:  # noqa: ARG002
        """Add a gradient bucket for each parameter, as DDP would."""
        if self._averages_gradients:
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                self._buckets.append(bucket := torch.empty_like(parameter, requires_grad=False))

                def into_bucket(parameter: Tensor, bucket: Tensor = bucket) -> None:
                    parameter.grad = bucket

                hook = parameter.register_post_accumulate_grad_hook
                hook(into_bucket)  # type: ignore[no-untyped-call]
        return model

    def loss_scaler(self, precision: Precision) -> torch.amp.GradScaler:  # noqa: ARG002
        """Return a disabled scaler."""
        # Fake gradients have no values to check for overflow.
        return torch.amp.GradScaler("cpu", enabled=False)


def host_copy(value: Any) -> Any:
    """Copy the tensors of the state `value` to the CPU; everything else stays as it is."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: host_copy(item) for key, item in value.items()}
    return type(value)(map(host_copy, value)) if isinstance(value, list | tuple) else value
