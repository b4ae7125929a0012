"""Named hardware: parser of `GPU=`, which names a machine to plan for without having it.

    NAME[xN][:FREE]    h100-80g    h100-80gx4    h100-80gx4:70G    rtx3090:20.5Gi
    cpu-SIZEg[-BF16]   cpu-24g     cpu-24g-amxx16    cpu-64g-avx512:40Gi

N devices of one model (for a CPU: cores), each with FREE memory: G is decimal (1e9), Gi is 2**30.
"""

from __future__ import annotations

import re
from typing import Literal, cast

from lib.errors import ConfigError
from lib.plan.gpus import CATALOGUE, gpu_of
from lib.plan.types import Device, Hardware

ALL = "all"

# Memory in use on an idle machine. GPUs: on the machines recorded under tests/fixtures/hardware the driver
# holds 0.2 to 2.4 %, for half of them up to 0.8 %; a desktop on the same GPU takes more (4 % there). Apple's
# total is already what the system grants. Main memory: 7 % on a mostly idle system.
IDLE_SHARE = {"cuda": 0.01, "rocm": 0.01, "mps": 0.0, "cpu": 0.07}

MAX_DEVICES = 1024  # upper end of the range of CONFIG_NUM_DEVICES
MAX_CPUS = 4096
ASSUMED_CPUS = 8  # for machines known by name only; no GPU batch size depends on it
MAX_TEXT = 60

_UNITS = {"g": 10**9, "gi": 2**30}
_COUNTED = re.compile(r"(?P<name>.*[0-9].*?)x(?P<count>[0-9]+)")  # the x of rtx3090 starts no count
_FREE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>gi|g)")
_CPU = re.compile(r"cpu-(?P<gib>[0-9]{1,5})g(?:-(?P<bf16>amx|avx512))?")


def machine_names(text: str) -> tuple[str, ...]:
    """Return the machine names in `text`: every GPU of the catalogue for "all", else `text` itself."""
    return tuple(CATALOGUE) if text.strip().lower() == ALL else (text,)


def parse_gpu(text: str) -> Hardware:
    """Return the hardware that `text` names, in either case.
    Raises ConfigError where the model is not in the catalogue, or the count or the free memory is invalid."""
    name, count, free = _parts(text)
    cpu = _CPU.fullmatch(name)
    if cpu:
        return _cpu_machine(text, cpu, count=count, free=free)
    if name.startswith("cpu"):
        raise _error(text, f"{name!r} is not a CPU", todo="write cpu-24g, cpu-24g-amx or cpu-24g-avx512")
    try:
        gpu = gpu_of(name)
    except ConfigError as error:
        raise _error(text, error.what, todo=error.todo) from None
    world = 1 if count is None else count
    if not 1 <= world <= MAX_DEVICES:
        raise _error(text, f"a machine cannot have {world} GPUs", todo=f"name 1 to {MAX_DEVICES}")
    device = Device(
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        free_bytes=_free_bytes(text, free, total_bytes=gpu.total_bytes, idle_share=IDLE_SHARE[gpu.kind]),
        capability=gpu.capability,
    )
    return Hardware(kind=gpu.kind, devices=(device,) * world, cpu_name="unknown CPU", cpu_count=ASSUMED_CPUS)


def _parts(text: str) -> tuple[str, int | None, str | None]:
    """Split `text` into (name, count, free memory) as written, in lower case. Raises ConfigError."""
    plain = text.lower()
    if not plain.strip():
        raise _error(text, "no GPU is named", todo="write a name as in GPU=h100-80g, or GPU=all for a table")
    if len(text) > MAX_TEXT or not text.isprintable():
        raise _error(text, "that is no name of a machine", todo="write it as in GPU=h100-80gx4:70G")
    if plain == ALL:
        raise _error(text, "that is every machine, and one is needed", todo="name one, as in GPU=h100-80g")
    machine, colon, free = plain.partition(":")
    if machine in CATALOGUE:
        return machine, None, free if colon else None
    counted = _COUNTED.fullmatch(machine)
    name, count = (counted["name"], int(counted["count"])) if counted else (machine, None)
    return name, count, free if colon else None


def _free_bytes(text: str, free: str | None, *, total_bytes: int, idle_share: float) -> int:
    if free is None:
        return total_bytes - round(total_bytes * idle_share)
    written = _FREE.fullmatch(free)
    if not written:
        raise _error(
            text,
            f"{free!r} is no size of free memory" if free else "no free memory after the colon",
            todo="write it as 70G (decimal) or 65.2Gi, or leave it out for that of an idle machine",
        )
    free_bytes = round(float(written["number"]) * _UNITS[written["unit"]])
    if not 0 < free_bytes <= total_bytes:
        raise _error(
            text,
            f"{free_bytes / 1e9:.1f} GB cannot be free of {total_bytes / 1e9:.1f} GB "
            f"({total_bytes / 2**30:.1f} GiB)",
            todo="name more than nothing, and no more than there is",
        )
    return free_bytes


def _cpu_machine(text: str, cpu: re.Match[str], *, count: int | None, free: str | None) -> Hardware:
    total_bytes = int(cpu["gib"]) * 2**30  # memory modules come in powers of two
    cpus = ASSUMED_CPUS if count is None else count
    if not total_bytes:
        raise _error(text, "a machine cannot have 0 GiB of memory", todo="write it as in GPU=cpu-24g")
    if not 1 <= cpus <= MAX_CPUS:
        raise _error(text, f"a machine cannot have {cpus} CPUs", todo=f"name 1 to {MAX_CPUS}")
    name = f"a CPU with {cpu['gib']} GiB"
    free_bytes = _free_bytes(text, free, total_bytes=total_bytes, idle_share=IDLE_SHARE["cpu"])
    return Hardware(
        kind="cpu",
        devices=(Device(name=name, total_bytes=total_bytes, free_bytes=free_bytes),),
        cpu_name=name,
        cpu_count=cpus,
        cpu_bf16=cast(Literal["none", "avx512", "amx"], cpu["bf16"] or "none"),
    )


def _error(text: str, why: str, *, todo: str) -> ConfigError:
    shown = text if text.isprintable() and len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]!r}..."
    return ConfigError(f"GPU={shown} cannot be planned for", why=why, todo=todo)
