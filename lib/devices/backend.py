"""Backend of this process, and numerics of the libraries under torch."""

from __future__ import annotations

import os
import warnings

import torch
from torch import nn

from lib.devices.base import Backend, DistributedBackend
from lib.errors import ConfigError
from lib.plan.types import Kind, Precision

_SIMD_CHANNELS = 8  # of single precision in a register of AVX2

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


def check_channels_last(model: nn.Module) -> None:
    """Raise ConfigError where the CPU's kernels corrupt memory in the layout of CONFIG_CHANNELS_LAST.

    Without AVX-512, the backward pass of a 1x1 convolution of stride 2 with fewer than 8 input channels
    writes beyond its buffer (seen with torch 2.13.0: segmentation faults, bus errors and aborts).
    """
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return
    for name, module in model.named_modules():
        strided = isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1) and module.stride != (1, 1)
        if strided and module.in_channels < _SIMD_CHANNELS:
            raise ConfigError(
                f"CONFIG_CHANNELS_LAST=y is not possible on this CPU: {name} is a 1x1 convolution with a "
                f"stride and {module.in_channels} input channels",
                why="PyTorch's kernel for CPUs without AVX-512 corrupts memory there",
                todo=f"set CONFIG_CHANNELS_LAST=n, or give it {_SIMD_CHANNELS} channels",
            )
