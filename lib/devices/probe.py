"""Hardware discovery: devices, their free memory, and the CPUs and memory this process may use.

Torch is imported only to query a GPU.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from lib.errors import PlanError
from lib.plan.types import Device, Hardware, Kind

ROOT = Path("/")
SPEED_VARIABLES = (
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
# Controller of a control group ("": version 2) -> its files of the limit and the usage, and the name of the
# page cache that the kernel can drop in memory.stat.
_CGROUP_MEMORY = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def probe(device: Literal["auto", "cuda", "mps", "xla", "tpu", "cpu"]) -> Hardware:
    """Return the hardware for CONFIG_DEVICE: its GPUs, or the memory that this process may use.

    Querying a CUDA or ROCm driver for free memory opens a context on each GPU, which takes some of it. Raises
    PlanError where the device does not exist or a GPU does not respond.
    """
    cpuinfo = _read(ROOT / "proc/cpuinfo")
    cpu_name = parse_cpu_name(cpuinfo) or _sysctl("machdep.cpu.brand_string") or platform.machine()
    kind, devices = _accelerators(device, cpu_name)
    if not devices and device in ("cuda", "mps"):
        raise PlanError(
            f"CONFIG_DEVICE_{device.upper()} is not possible",
            why=f"torch finds no {'CUDA or ROCm' if device == 'cuda' else 'Apple'} GPU",
            todo="set CONFIG_DEVICE_AUTO=y, or install a torch that is built for the GPU",
        )
    return Hardware(
        kind=kind,
        devices=devices or (main_memory(cpu_name),),
        cpu_name=cpu_name,
        cpu_count=cpu_count(),
        cpu_bf16=parse_cpu_bf16(cpuinfo),
    )


def environment() -> dict[str, str | bool | None]:
    """Return versions and the state of the sources, for the record of a run; None where unknown."""
    commit, dirty = git_state(Path(__file__).resolve().parents[2])
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "git_commit": commit,
        "git_dirty": dirty,
    }


def speed_settings() -> dict[str, str]:
    """Return the GPUs' driver and the variables that memory and speed depend on; "" where not set."""
    driver = _read(ROOT / "proc/driver/nvidia/version") or _read(ROOT / "sys/module/amdgpu/version")
    return {
        "driver": driver.partition("\n")[0],
        **{name: os.environ.get(name, "") for name in SPEED_VARIABLES},
    }


def git_state(tree: Path) -> tuple[str | None, bool | None]:
    """Return commit and whether tracked files differ; None where `tree` is not the top of a checkout."""
    top = _output("git", "-C", str(tree), "rev-parse", "--show-toplevel")
    commit = _output("git", "-C", str(tree), "rev-parse", "HEAD")
    if not top or not commit or Path(top).resolve() != tree.resolve():
        return None, None
    return commit, bool(_output("git", "-C", str(tree), "status", "--porcelain", "--untracked-files=no"))


def parse_cpu_name(cpuinfo: str) -> str:
    """Return the model name in the text of /proc/cpuinfo, "" if there is none (as on ARM)."""
    return _cpuinfo_field(cpuinfo, "model name")


def parse_cpu_bf16(cpuinfo: str) -> Literal["none", "avx512", "amx"]:
    """Return the bf16 instructions in the text of /proc/cpuinfo."""
    flags = _cpuinfo_field(cpuinfo, "flags").split()
    if "amx_bf16" in flags:
        return "amx"
    return "avx512" if "avx512_bf16" in flags else "none"


def linux_memory(root: Path = ROOT) -> tuple[int, int]:
    """Return (total, free) bytes for this process: of the machine, or of its tightest control group.

    root: parent of /proc and /sys. Page cache that the kernel can drop counts as free.
    """
    fields = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    meminfo = {name: int(rest[0]) * 1024 for name, *rest in fields if rest[1:] == ["kB"]}
    if not {"MemTotal:", "MemAvailable:"} <= meminfo.keys():
        raise PlanError(f"{root / 'proc/meminfo'} does not say how much memory there is")
    total, free = meminfo["MemTotal:"], meminfo["MemAvailable:"]
    for controller, (limit_file, usage_file, droppable_name) in _CGROUP_MEMORY.items():
        for path in _cgroups(root, controller=controller):
            limit, usage = _number(path / limit_file), _number(path / usage_file)
            if limit is not None and usage is not None:
                stat = dict(line.split() for line in _read(path / "memory.stat").splitlines())
                usage -= int(stat.get(droppable_name, 0))
                total, free = min(total, limit), min(free, limit - usage)
    return total, max(free, 0)


def linux_cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU quota of this process's control groups, in CPUs; None where not limited."""
    quotas = [_read(path / "cpu.max").split() for path in _cgroups(root, controller="")]
    quotas += [
        [_read(path / "cpu.cfs_quota_us").strip(), _read(path / "cpu.cfs_period_us").strip()]
        for path in _cgroups(root, controller="cpu")
    ]
    shares = [int(quota[0]) / int(quota[1]) for quota in quotas if quota and quota[0].isdigit()]
    return min(shares, default=None)


def parse_vm_stat(text: str) -> int:
    """Return free bytes from the output of vm_stat (macOS): free, inactive and speculative pages."""
    page_bytes = int(text.split("page size of ")[1].split()[0])
    counts = dict(line.split(":") for line in text.splitlines()[1:] if ":" in line)
    names = ("Pages free", "Pages inactive", "Pages speculative")
    return page_bytes * sum(int(counts[name].strip().rstrip(".")) for name in names)


def _accelerators(device: str, cpu_name: str) -> tuple[Kind, tuple[Device, ...]]:
    if device in ("xla", "tpu"):
        from lib.devices.accelerators import tpu_devices, xla_devices

        return ("xla", xla_devices(main_memory(cpu_name))) if device == "xla" else ("tpu", tpu_devices())
    if device in ("auto", "cuda"):
        kind, devices = _cuda_gpus()
        if devices:
            return kind, devices
    if device in ("auto", "mps") and (devices := _apple_gpus()):
        return "mps", devices
    return "cpu", ()


def _cuda_gpus() -> tuple[Kind, tuple[Device, ...]]:
    import torch

    kind: Kind = "rocm" if torch.version.hip else "cuda"
    if not torch.cuda.is_available():
        return kind, ()
    devices = []
    for index in range(torch.cuda.device_count()):
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            raise PlanError(
                f"GPU {index} does not tell its free memory",
                why=str(error).splitlines()[0],
                todo="end what is using it, or hide it with CUDA_VISIBLE_DEVICES",
            ) from error
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index) if kind == "cuda" else None
        device = Device(name=name, total_bytes=total_bytes, free_bytes=free_bytes, capability=capability)
        devices.append(device)
    return kind, tuple(devices)


def _apple_gpus() -> tuple[Device, ...]:
    import torch

    if not torch.backends.mps.is_available():
        return ()
    total_bytes = torch.mps.recommended_max_memory()
    free_bytes = max(total_bytes - torch.mps.driver_allocated_memory(), 0)
    name = _sysctl("machdep.cpu.brand_string") or "Apple GPU"
    return (Device(name=name, total_bytes=total_bytes, free_bytes=free_bytes),)


def main_memory(name: str) -> Device:
    """Return the memory that this process may use, as a device called `name`."""
    if platform.system() == "Darwin":
        total_bytes, free_bytes = int(_sysctl("hw.memsize")), parse_vm_stat(_output("vm_stat"))
    else:
        total_bytes, free_bytes = linux_memory()
    return Device(name=name, total_bytes=total_bytes, free_bytes=free_bytes)


def cpu_count() -> int:
    """Return the number of CPUs that this process may use."""
    # macOS has neither affinity nor control groups.
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = linux_cpu_quota()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def _cgroups(root: Path, *, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group and its parents; controller "" is version 2.

    In a container the group's own path may not be visible; the mount point then stands for it.
    """
    mount = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.lstrip("/")
            yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(mount))


def _cpuinfo_field(cpuinfo: str, name: str) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """Read a file of the kernel, "" where this kernel has none or hides it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    return _output("sysctl", "-n", name) if platform.system() == "Darwin" else ""


def _output(*command: str) -> str:
    """Return a command's output, "" where it does not exist or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
