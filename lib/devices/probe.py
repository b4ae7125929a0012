"""Hardware discovery: devices, their free memory, and the CPUs and memory this process may use.

Torch is imported only to query a GPU.
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Literal

from lib.devices import host
from lib.errors import PlanError
from lib.plan.types import OWN_MEMORY, Device, Hardware, Kind


def probe(device: Literal["auto", "cuda", "mps", "xla", "tpu", "cpu"]) -> Hardware:
    """Return the hardware for CONFIG_DEVICE: its GPUs, or the memory that this process may use.

    Querying a CUDA or ROCm driver for free memory opens a context on each GPU, which takes some of it. Raises
    PlanError where the device does not exist or a GPU does not respond.
    """
    cpuinfo = host.read(host.ROOT / "proc/cpuinfo")
    cpu_name = host.parse_cpu_name(cpuinfo) or host.sysctl("machdep.cpu.brand_string") or platform.machine()
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
        cpu_count=host.cpu_count(),
        cpu_bf16=host.parse_cpu_bf16(cpuinfo),
        host_free_bytes=main_memory(cpu_name).free_bytes if kind in OWN_MEMORY else None,
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


def git_state(tree: Path, *, anywhere: bool = False) -> tuple[str | None, bool | None]:
    """Return commit and whether tracked files differ; None where `tree` is not the top of a checkout.

    anywhere: `tree` may be any folder of a checkout, and files below it that are not tracked count, too.
    """
    top = host.output("git", "-C", str(tree), "rev-parse", "--show-toplevel")
    commit = host.output("git", "-C", str(tree), "rev-parse", "HEAD")
    if not top or not commit or (Path(top).resolve() != tree.resolve() and not anywhere):
        return None, None
    others = f"--untracked-files={'all' if anywhere else 'no'}"
    return commit, bool(host.output("git", "-C", str(tree), "status", "--porcelain", others, "--", "."))


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
    name = host.sysctl("machdep.cpu.brand_string") or "Apple GPU"
    return (Device(name=name, total_bytes=total_bytes, free_bytes=free_bytes),)


def main_memory(name: str) -> Device:
    """Return the memory that this process may use, as a device called `name`."""
    total_bytes, free_bytes = host.memory_bytes()
    return Device(name=name, total_bytes=total_bytes, free_bytes=free_bytes)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
