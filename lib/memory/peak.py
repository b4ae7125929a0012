"""Measured peak of the device memory of this process."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lib.devices.base import Backend

_STATUS = Path("/proc/self/status")
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss


class Peak:
    """Peak bytes used by training from now on, beyond what is in use already; on the fullest device."""

    def __init__(self, backend: Backend) -> None:
        self._device, self._devices = backend.device, backend.devices
        if self._device.type == "cuda":
            # Also creates the CUDA contexts, before they could count as training's.
            self._free_before = [torch.cuda.mem_get_info(device)[0] for device in self._devices]
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
        elif self._device.type == "mps":
            self._before = torch.mps.driver_allocated_memory()
        else:
            with contextlib.suppress(OSError):  # resets the high-water mark, where the kernel allows it
                Path("/proc/self/clear_refs").write_text("5")
            self._before = resident_bytes("VmRSS")

    def need_bytes(self) -> int:
        """Return the peak so far: the allocator's and libraries' memory, or resident memory on CPUs."""
        if self._device.type == "cuda":
            return max(map(_of_gpu, self._devices, self._free_before))
        if self._device.type == "mps":  # the driver's pool never shrinks
            return max(0, torch.mps.driver_allocated_memory() - self._before)
        return max(0, resident_bytes("VmHWM") - self._before)

    def retries(self) -> int:
        """Number of times the allocator released its cache to find room: 0 if memory is sufficient."""
        if self._device.type != "cuda":
            return 0
        return sum(int(torch.cuda.memory_stats(device)["num_alloc_retries"]) for device in self._devices)


def training_peak(backend: Backend) -> Callable[[], int | None]:
    """Return a function that gives the peak bytes of training from now on; None where they are not measured.

    Of tensors on the fullest device, where the backend counts them. On CPUs it is the growth of this process'
    resident memory. The high-water mark stays as it is, because sweeps read it: below an earlier one the peak
    is the largest size at any call.
    """
    if backend.device.type != "cpu":
        return backend.peak_memory_bytes
    before, earlier, seen = resident_bytes(), resident_bytes("VmHWM"), 0

    def measure() -> int:
        nonlocal seen
        seen, highest = max(seen, resident_bytes()), resident_bytes("VmHWM")
        return max(0, (highest if highest > earlier else seen) - before)

    return measure


def _of_gpu(device: torch.device, free_before: int) -> int:
    used = free_before - torch.cuda.mem_get_info(device)[0]
    beside = max(0, used - torch.cuda.memory_reserved(device))
    return torch.cuda.max_memory_reserved(device) + beside


def limit_main_memory(usable_bytes: int) -> None:
    """Limit further allocations of this process to `usable_bytes`, on Linux.

    Beyond it an allocation fails with an error that can be reported, where the kernel would kill some
    process. If it comes to that, this process is marked as the first to be killed.
    """
    allocated = _status_bytes("VmData")
    if allocated is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = allocated + usable_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    with contextlib.suppress(OSError):  # not every kernel has it
        Path("/proc/self/oom_score_adj").write_text("1000")


def resident_bytes(name: str = "VmRSS") -> int:
    """Resident memory of this process: VmRSS now, VmHWM at its peak (used for both outside Linux).

    Not by getrusage on Linux: a new process starts there with its parent's peak.
    """
    found = _status_bytes(name)
    if found is not None:
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES


def _status_bytes(name: str) -> int | None:
    """Read a size from /proc/self/status; None outside Linux."""
    if not _STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024 if name in fields else None
