"""Discovery of accelerators in a subprocess: XLA devices by torch_xla, TPUs by torch_tpu.

Both packages acquire the devices, which training needs, and may wait for them forever.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

from lib.errors import PlanError
from lib.plan.placement import TPU
from lib.plan.types import STATIC_SHAPES, Device, Kind

Package: TypeAlias = Literal["xla", "tpu"]

TIMEOUT_SECONDS = 120.0
COMMANDS: dict[Package, tuple[str, ...]] = {
    "xla": (sys.executable, "-m", "lib.devices.xla"),
    "tpu": (sys.executable, "-m", "lib.devices.tpu"),
}
PCI_DEVICES = Path("/sys/bus/pci/devices")
# Google's network and storage devices have its vendor id, too. The device ids are those of torch_tpu 0.2.
GOOGLE = "0x1ae0"
GENERATIONS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7"}


def xla_devices(memory: Device) -> tuple[Device, ...]:
    """Return the XLA devices; a CPU device shares `memory`. Raises PlanError where torch_xla fails."""
    if importlib.util.find_spec("torch_xla") is None:
        todo = "install it beside a torch of its own (docs/distributed.md)"
        raise _refusal("xla", why="torch_xla is not installed", todo=todo)
    found = json.loads(_last_line("xla"))
    own = {"total_bytes": memory.total_bytes, "free_bytes": memory.free_bytes // len(found)}
    return tuple(Device(**({**one, **own} if one["total_bytes"] is None else one)) for one in found)


def tpu_devices() -> tuple[Device, ...]:
    """Return the TPUs of this node. Raises PlanError where there are none, or torch_tpu fails."""
    # Checked first: it is fast, and avoids torch_tpu's behaviour without a TPU.
    if not _has_tpu():
        why = f"no PCI device here is a TPU (vendor {GOOGLE}, {', '.join(GENERATIONS.values())})"
        raise _refusal("tpu", why=why, todo="train on a TPU VM")
    for name in ("torch_tpu", "libtpu"):  # torch_tpu aborts without libtpu
        if importlib.util.find_spec(name) is None:
            todo = "install it in an environment of its own (docs/distributed.md)"
            raise _refusal("tpu", why=f"{name} is not installed", todo=todo)
    _check_torch()
    return tuple(Device(**one) for one in json.loads(_last_line("tpu")))


def launch_variables(kind: Kind, *, processes: int) -> dict[str, str]:
    """Return variables for `processes` processes, one device each. Raises PlanError if torch_tpu fails."""
    if kind != "tpu":
        return {}
    words = shlex.split(_last_line("tpu", "launch", str(processes)))
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def probed_by_launcher(kind: Kind) -> bool:
    """Return True for devices that a process cannot probe once others have opened them."""
    return kind == "xla"


def launch_command(command: str, kind: Kind, *, name: str, processes: int) -> str:
    """Return `command` for a shell on each host. name: of the device; "" for another host's TPU."""
    if kind not in STATIC_SHAPES or not (name or TPU).startswith(TPU):
        return command
    experimental = "# Experimental, never run on TPU hardware."
    if kind == "tpu":
        return f"{experimental}\nenv $(python -m lib.devices.tpu launch {processes}) {command}"
    return f"{experimental} On each host of the slice (gcloud: --worker=all):\nPJRT_DEVICE=TPU {command}"


def _has_tpu() -> bool:
    for device in sorted(PCI_DEVICES.glob("*")):
        try:
            vendor, number = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue  # a device that was removed, or is hidden
        if vendor == GOOGLE and number in GENERATIONS:
            return True
    return False


def _check_torch() -> None:
    """Raise PlanError where the installed torch is outside the range that torch_tpu requires."""
    required = next((one for one in metadata.requires("torch_tpu") or () if re.match(r"torch\b", one)), "")
    torch = metadata.version("torch")
    for bound, number in re.findall(r"([<>]=)\s*([\d.]+)", required):
        installed, limit = _release(torch), _release(number)
        if installed < limit if bound == ">=" else installed > limit:
            why = f"torch is {torch}, and torch_tpu {metadata.version('torch_tpu')} requires {required}"
            raise _refusal("tpu", why=why, todo="install a torch in that range beside it")


def _release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version such as 2.13.0+cpu."""
    numbers = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]
    return (*numbers, *(0 for _ in range(3 - len(numbers))))


def _last_line(package: Package, *arguments: str) -> str:
    """Return the last line printed by the package's command; libraries may print before it."""
    command = [*COMMANDS[package], *arguments]
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        why = f"torch_{package} did not answer within {TIMEOUT_SECONDS:g} s"
        raise _refusal(package, why=why, todo="end what is using the devices") from error
    if done.returncode:
        why = next(reversed(done.stderr.rstrip("\n").split("\n")), "") or f"status {done.returncode}"
        ran = " ".join(["python", "-m", f"lib.devices.{package}", *arguments])
        raise _refusal(package, why=why, todo=f"see whether `{ran}` runs")
    return done.stdout.strip().splitlines()[-1]


def _refusal(package: Package, *, why: str, todo: str) -> PlanError:
    what = f"CONFIG_DEVICE_{package.upper()} is not possible"
    return PlanError(what, why=why, todo=f"{todo}, or set CONFIG_DEVICE_AUTO=y")
