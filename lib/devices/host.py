"""Memory, CPUs and settings of this host, as far as the standard library tells.

`make doctor` runs this before anything is installed: it imports nothing but `lib.errors`.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from lib.errors import PlanError

ROOT = Path("/")
# Of torch's allocator of GPU memory; torch reads the first that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
ALLOCATOR_DEFAULT = "PYTORCH_ALLOC_CONF=expandable_segments:True"
SPEED_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "KMP_AFFINITY",
    "KMP_DUPLICATE_LIB_OK",
    *ALLOCATOR_VARIABLES,
)
# Controller of a control group ("": version 2) -> its files of the limit and the usage, and the name of the
# page cache that the kernel can drop in memory.stat.
_CGROUP_MEMORY = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def speed_settings() -> dict[str, str]:
    """Return the GPUs' driver and the variables that memory and speed depend on; "" where not set."""
    driver = read(ROOT / "proc/driver/nvidia/version") or read(ROOT / "sys/module/amdgpu/version")
    return {
        "driver": driver.partition("\n")[0],
        **{name: os.environ.get(name, "") for name in SPEED_VARIABLES},
    }


def allocator_setting() -> str:
    """Return the setting of torch's allocator in runs on CUDA, NAME=value: the user's, else the default."""
    name = next((name for name in ALLOCATOR_VARIABLES if name in os.environ), None)
    return ALLOCATOR_DEFAULT if name is None else f"{name}={os.environ[name]}"


def expandable_segments() -> bool:
    """Return True if runs on CUDA allocate in expandable segments."""
    setting = "".join(allocator_setting().split())
    return setting.rpartition("expandable_segments:")[2].startswith("True")


def set_up_allocator() -> None:
    """Make `allocator_setting` that of this process and those that it starts, before torch is imported.

    Only on Linux and not for ROCm: elsewhere torch has no expandable segments, or has them since ROCm 7 only.
    """
    try:
        build = metadata.version("torch")
    except metadata.PackageNotFoundError:  # the import of torch says more
        return
    if platform.system() == "Linux" and "rocm" not in build:
        name, _, value = allocator_setting().partition("=")
        os.environ[name] = value


def allocator_text() -> str:
    """Return `allocator_setting` and its origin in words."""
    setting = allocator_setting()
    ours = "the default of runs; what you set in the environment is kept"
    return f"Allocator: {setting} ({ours if setting == ALLOCATOR_DEFAULT else 'set in the environment'})"


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
    fields = (line.split() for line in read(root / "proc/meminfo").splitlines())
    meminfo = {name: int(rest[0]) * 1024 for name, *rest in fields if rest[1:] == ["kB"]}
    if not {"MemTotal:", "MemAvailable:"} <= meminfo.keys():
        raise PlanError(f"{root / 'proc/meminfo'} does not say how much memory there is")
    total, free = meminfo["MemTotal:"], meminfo["MemAvailable:"]
    for controller, (limit_file, usage_file, droppable_name) in _CGROUP_MEMORY.items():
        for path in _cgroups(root, controller=controller):
            limit, usage = _number(path / limit_file), _number(path / usage_file)
            if limit is not None and usage is not None:
                stat = dict(line.split() for line in read(path / "memory.stat").splitlines())
                usage -= int(stat.get(droppable_name, 0))
                total, free = min(total, limit), min(free, limit - usage)
    return total, max(free, 0)


def linux_cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU quota of this process's control groups, in CPUs; None where not limited."""
    quotas = [read(path / "cpu.max").split() for path in _cgroups(root, controller="")]
    quotas += [
        [read(path / "cpu.cfs_quota_us").strip(), read(path / "cpu.cfs_period_us").strip()]
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


def memory_bytes() -> tuple[int, int]:
    """Return (total, free) bytes of memory for this process. Raises PlanError where the kernel hides them."""
    if platform.system() == "Darwin":
        return int(sysctl("hw.memsize")), parse_vm_stat(output("vm_stat"))
    return linux_memory()


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
    for line in read(root / "proc/self/cgroup").splitlines():
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
    text = read(path).strip()
    return int(text) if text.isdigit() else None


def read(path: Path) -> str:
    """Read a file of the kernel, "" where this kernel has none or hides it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def sysctl(name: str) -> str:
    """Return a value of macOS's kernel, "" on other systems."""
    return output("sysctl", "-n", name) if platform.system() == "Darwin" else ""


def output(*command: str) -> str:
    """Return a command's output, "" where it does not exist or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def given_to_make(*names: str) -> list[str]:
    """Return the variables of these names that the command line of make sets, as a shell takes them."""
    _, _, given = os.environ.get("MAKEFLAGS", "").partition("-- ")
    words = (re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:[^\s\\]|\\.)+", given))
    return [shlex.quote(word) for word in words if word.partition("=")[0] in names]


def make_in(root: Path) -> str:
    """Return how make is called for the tree at `root`, in the folder of the program that trains in it.

    `train.api` names that folder; without it, it is the tree.
    """
    caller = os.environ.get("ANNEAL_CALLER", root)
    return "make" if Path(caller) == root else f"make -C {shlex.quote(str(root))}"
