"""What this process takes of its device's memory, measured."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch

from lib.devices.base import Backend

_STATUS = Path("/proc/self/status")
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


class Peak:
    """Bytes that training takes from now on, at most, beyond what is taken already; on the fullest device."""

    def __init__(self, backend: Backend) -> None:
        self._device, self._devices = backend.device, backend.devices
        if self._device.type == "cuda":
            # Opens the contexts, too.
            self._free_before = [torch.cuda.mem_get_info(device)[0] for device in self._devices]
            for device in self._devices:
                torch.cuda.reset_peak_memory_stats(device)
        elif self._device.type == "mps":
            self._before = torch.mps.driver_allocated_memory()
        else:
            with contextlib.suppress(OSError):  # where the kernel lets it, the highest so far is forgotten
                Path("/proc/self/clear_refs").write_text("5")
            self._before = resident_bytes("VmRSS")

    def need_bytes(self) -> int:
        """The most so far: what the allocator took and what libraries took beside it, or resident memory."""
        if self._device.type == "cuda":
            return max(map(_of_gpu, self._devices, self._free_before))
        if self._device.type == "mps":  # the driver's pool does not shrink
            return max(0, torch.mps.driver_allocated_memory() - self._before)
        return max(0, resident_bytes("VmHWM") - self._before)

    def retries(self) -> int:
        """How often the allocator had to give its cache back to find room: 0 where memory is enough."""
        if self._device.type != "cuda":
            return 0
        return sum(int(torch.cuda.memory_stats(device)["num_alloc_retries"]) for device in self._devices)


def _of_gpu(device: torch.device, free_before: int) -> int:
    used = free_before - torch.cuda.mem_get_info(device)[0]
    beside = max(0, used - torch.cuda.memory_reserved(device))
    return torch.cuda.max_memory_reserved(device) + beside


def limit_main_memory(usable_bytes: int) -> None:
    """Let this process allocate that much more and no more, where Linux keeps the count.

    Beyond it an allocation fails, which can be told; without a limit the kernel would end some process.
    Should it come to that, let it be this one.
    """
    taken = _status_bytes("VmData")
    if taken is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = taken + usable_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    with contextlib.suppress(OSError):  # a kernel that does not have it
        Path("/proc/self/oom_score_adj").write_text("1000")


def resident_bytes(name: str = "VmRSS") -> int:
    """Of this process. VmRSS: what is resident now; VmHWM: the most so far, which stands for both elsewhere
    than on Linux.

    Not by getrusage on Linux: a new process begins there with the most of the one that started it.
    """
    found = _status_bytes(name)
    if found is not None:
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES


def _status_bytes(name: str) -> int | None:
    """A size in what Linux says of this process; None elsewhere."""
    if not _STATUS.exists():
        return None
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024 if name in fields else None
