"""Backend of this process, and numerics of the libraries under torch."""

from __future__ import annotations

import os
import warnings

import torch

from lib.devices.base import Backend, DistributedBackend
from lib.plan.types import Kind, Precision

# Messages of libraries under torch that run out of memory without raising OutOfMemoryError.
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def open_backend(kind: Kind, *, world: int | None, devices: int = 1) -> Backend:
    """Open the backend of this process, which for world != 1 must have been started by `launch`.

    world: None for the number of processes that were started. devices: GPUs per process.
    """
    alone, one_of_several = _classes_for(kind)
    if world == 1:
        return alone(kind, devices=devices)
    started = int(os.environ["WORLD_SIZE"])
    assert world in (None, started), f"the plan is for {world} processes, {started} were started"
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    backend = one_of_several(kind, rank=rank, world=started, local_rank=local_rank, devices=devices)
    backend.local_world = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    return backend


def _classes_for(kind: Kind) -> tuple[type[Backend], type[DistributedBackend]]:
    if kind == "tpu":
        from lib.devices.tpu import DistributedTpuBackend, TpuBackend

        return TpuBackend, DistributedTpuBackend
    if kind != "xla":
        return Backend, DistributedBackend
    from lib.devices.xla import (  # loads torch_xla, which may acquire the devices
        DistributedXlaBackend,
        XlaBackend,
    )

    return XlaBackend, DistributedXlaBackend


def configure_numerics(precision: Precision, *, deterministic: bool) -> None:
    """Configure float32 precision and determinism of the libraries under torch.

    precision:     fp32 keeps all 24 mantissa bits; the others allow TF32, with 11.
    deterministic: raise on nondeterministic operations; otherwise the fastest kernels are selected.
    """
    # Not the newer switches (fp32_precision): the compiler's convolutions cannot read those.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "fp32"
    if deterministic:
        # cuBLAS reads it at first use and is not deterministic without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def configure_threads(kind: Kind, *, cpu_count: int, world: int) -> None:
    """Divide the CPUs of this process among the ranks, unless OMP_NUM_THREADS is set or there is a GPU."""
    if kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cpu_count // world))


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` means that device or host memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
