"""Hardware by name: the catalogue of GPUs, read from `gpus.toml`, and the parser of `GPU=`.

NAME[xN][:FREE]    h100-80g    h100-80gx4    h100-80gx4:70G    rtx3090:20.5Gi
cpu-SIZEg[-BF16]   cpu-24g     cpu-24g-amxx16    cpu-64g-avx512:40Gi
tpu-SLICE[:FREE]   tpu-v4-8    tpu-v5e-8         tpu-v6e-4:28Gi
all[xN]            all         allx4

N devices of one model (for a CPU: cores), each with FREE memory: G is decimal (1e9), Gi is 2**30.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

from lib.errors import ConfigError
from lib.plan.placement import UNKNOWN_CPU
from lib.plan.tpus import largest_slices, slice_names, slice_of, slice_sizes
from lib.plan.types import Device, Hardware

GpuKind: TypeAlias = Literal["cuda", "rocm", "mps", "tpu"]
Format: TypeAlias = Literal["bf16", "fp16", "fp8"]

MAX_SUGGESTIONS = 3
VENDOR_WORDS = ("nvidia", "geforce", "tesla", "amd", "instinct", "apple")
PCIE_BYTES_PER_SECOND = 32e9  # PCIe 4.0 x16, one direction
FIGURES = {
    "total_bytes": "memory",
    "half_tflops": "16-bit peak",
    "fp32_tflops": "fp32 peak",
    "gb_per_s": "memory bandwidth",
    "watts": "board power",
}

ALL = "all"

# Memory in use on an idle machine. GPUs: on the machines recorded under tests/fixtures/hardware the driver
# holds 0.2 to 2.4 %, for half of them up to 0.8 %; a desktop on the same GPU takes more (4 % there). Apple's
# and a TPU's total is already what the system grants. Main memory: 7 % on a mostly idle system.
IDLE_SHARE = {"cuda": 0.01, "rocm": 0.01, "mps": 0.0, "tpu": 0.0, "cpu": 0.07}

MAX_DEVICES = 1024  # upper end of the range of CONFIG_NUM_DEVICES
MAX_CPUS = 4096
ASSUMED_CPUS = 8  # for machines known by name only; no GPU batch size depends on it
MAX_TEXT = 60

_UNITS = {"g": 10**9, "gi": 2**30}
_COUNTED = re.compile(r"(?P<name>.*[0-9].*?)x(?P<count>[0-9]+)")  # the x of rtx3090 starts no count
_FREE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>gi|g)")
_CPU = re.compile(r"cpu-(?P<gib>[0-9]{1,5})g(?:-(?P<bf16>amx|avx512))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model of the catalogue. Rates are peaks from the vendor's papers."""

    key: str  # value of GPU=
    name: str  # as the driver spells it
    patterns: tuple[str, ...]  # other spellings, in lower case and without VENDOR_WORDS, with * and ?
    kind: GpuKind
    capability: tuple[int, int] | None  # CUDA compute capability; None for other kinds
    formats: tuple[Format, ...]  # with matrix units
    total_bytes: int
    half_flop_per_second: float | None  # bf16 or fp16 with fp32 accumulation; None without matrix units
    fp32_flop_per_second: float  # full fp32, no TF32
    bandwidth_bytes_per_second: float
    link_bytes_per_second: float  # one direction between two devices of a node
    watts: float | None  # board power at most; None if not known
    source: str
    estimated: tuple[str, ...]  # of FIGURES, those that neither a paper nor a driver reports

    @property
    def memory(self) -> str:
        """Memory in decimal GB and in GiB."""
        return f"{self.total_bytes / 1e9:.1f} GB ({self.total_bytes / 2**30:.1f} GiB)"

    @property
    def origin(self) -> str:
        """Source of the figures, and which of them are estimates."""
        guessed = ", ".join(FIGURES[name] for name in self.estimated)
        return f"{self.source}; {guessed} by our own estimate" if guessed else self.source


def find_gpu(driver_name: str) -> Gpu | None:
    """Return the row for a device's name as its driver reports it; None if it is not in the catalogue.

    Only whole names match: an "RTX 3090 Ti" or a MIG slice of another size does not match its neighbour.
    The memory of the row is that of one such GPU; a device that is present reports its own.
    """
    plain = _without_vendor(driver_name)
    for gpu in CATALOGUE.values():
        spellings = (_without_vendor(gpu.name), *gpu.patterns)
        if any(fnmatchcase(plain, spelling) for spelling in spellings):
            return gpu
    return None


def gpu_of(key: str) -> Gpu:
    """Return the row with that key, in either case. Raises ConfigError, with suggestions, for others."""
    gpu = CATALOGUE.get(key.lower())
    if gpu is None:
        near = suggestions(key)
        todo = f"did you mean {' or '.join(near)}?" if near else "GPU=all shows what there is"
        raise ConfigError(f"there is no {key!r} in the catalogue of GPUs", todo=todo)
    return gpu


def suggestions(text: str) -> tuple[str, ...]:
    """Return keys that `text` probably means: from a driver's name, a prefix of a key, or a typing error."""
    named = find_gpu(text)
    if named is not None:
        return (named.key,)
    letters = _letters(text)
    keys = {_letters(key): key for key in CATALOGUE}
    if len(letters) > 1:
        near = [key for other, key in keys.items() if other.startswith(letters)]
        if near:
            return tuple(near[:MAX_SUGGESTIONS])
    import difflib  # only after an error: the import is slow

    return tuple(keys[match] for match in difflib.get_close_matches(letters, keys, n=2, cutoff=0.6))


def machine_names(text: str) -> tuple[str, ...]:
    """Return the machine names in `text`.

    For "all" each GPU, and each TPU's largest slice; for "allx4" machines with four devices, which Apple's
    GPUs are not; else `text`.
    """
    named = re.fullmatch(rf"{ALL}(x[0-9]+)?", text.strip().lower())
    if named is None:
        return (text,)
    if named[1] is None:
        return *(key for key, gpu in CATALOGUE.items() if gpu.kind != "tpu"), *largest_slices()
    slices = (name for name in slice_names() if f"x{slice_of(name).devices}" == named[1])
    return *(key + named[1] for key, gpu in CATALOGUE.items() if gpu.kind in ("cuda", "rocm")), *slices


def machine_sizes(hardware: Hardware, others: Iterable[int]) -> list[int]:
    """Return numbers of devices like those of `hardware`: its own and `others`, or those of TPU slices."""
    if hardware.kind == "tpu":
        return sorted(slice_sizes(hardware.devices[0].name))
    return sorted({*others, len(hardware.devices)})


def parse_gpu(text: str) -> Hardware:
    """Return the hardware that `text` names, in either case.

    Raises ConfigError where the model is not in the catalogue, or the count or the free memory is invalid.
    """
    name, count, free = _parts(text)
    cpu = _CPU.fullmatch(name)
    if cpu:
        return _cpu_machine(text, cpu, count=count, free=free)
    if name.startswith("cpu"):
        raise _error(text, f"{name!r} is not a CPU", todo="write cpu-24g, cpu-24g-amx or cpu-24g-avx512")
    try:
        found = slice_of(name) if name.startswith("tpu") else None
        gpu = gpu_of(f"tpu-{found.generation}" if found else name)
    except ConfigError as error:
        raise _error(text, error.what, todo=error.todo) from None
    if found and count is not None:
        raise _error(text, "a slice has its number of TPUs in its name", todo=f"write GPU={name}")
    world = found.devices if found else 1 if count is None else count
    if not 1 <= world <= MAX_DEVICES:
        raise _error(text, f"a machine cannot have {world} GPUs", todo=f"name 1 to {MAX_DEVICES}")
    device = Device(
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        free_bytes=_free_bytes(text, free, total_bytes=gpu.total_bytes, idle_share=IDLE_SHARE[gpu.kind]),
        capability=gpu.capability,
    )
    return Hardware(kind=gpu.kind, devices=(device,) * world, cpu_name=UNKNOWN_CPU, cpu_count=ASSUMED_CPUS)


def _without_vendor(name: str) -> str:
    """Return a driver's name in lower case, without vendor words, which vary with the driver's version."""
    words = name.lower().split()
    while words and words[0] in VENDOR_WORDS:
        words = words[1:]
    return " ".join(words)


def _letters(text: str) -> str:
    return "".join(character for character in _without_vendor(text) if character.isalnum())


def _gpu(key: str, row: Mapping[str, Any], architecture: Mapping[str, Any]) -> Gpu:
    capability = architecture.get("capability")
    link = row.get("link_gb_per_s")
    return Gpu(
        key=key,
        name=row["name"],
        patterns=tuple(row.get("patterns", ())),
        kind=architecture["kind"],
        capability=tuple(capability) if capability else None,
        formats=tuple(architecture["formats"]),
        total_bytes=row["total_bytes"],
        half_flop_per_second=row["half_tflops"] * 1e12 if "half_tflops" in row else None,
        fp32_flop_per_second=row["fp32_tflops"] * 1e12,
        bandwidth_bytes_per_second=row["gb_per_s"] * 1e9,
        link_bytes_per_second=PCIE_BYTES_PER_SECOND if link is None else link * 1e9,
        watts=row.get("watts"),
        source=row["source"],
        estimated=tuple(row.get("estimated", ())),
    )


def _parts(text: str) -> tuple[str, int | None, str | None]:
    """Split `text` into (name, count, free memory) as written, in lower case. Raises ConfigError."""
    plain = text.lower()
    if not plain.strip():
        raise _error(text, "no GPU is named", todo="write a name as in GPU=h100-80g, or GPU=all for a table")
    if len(text) > MAX_TEXT or not text.isprintable():
        raise _error(text, "that is not the name of a machine", todo="write it as in GPU=h100-80gx4:70G")
    if re.fullmatch(rf"[^:]*,.*|{ALL}(x[0-9]+)?(:.*)?", plain):
        todo = "name it as in GPU=h100-80gx3:20Gi; make plan GPU=all, or GPU=allx3, makes a table of each"
        raise _error(text, "one is needed, with devices of one model", todo=todo)
    machine, colon, size = plain.partition(":")
    free, counted = size if colon else None, _COUNTED.fullmatch(machine)
    if machine in CATALOGUE or not counted:
        return machine, None, free
    return counted["name"], int(counted["count"]), free


def _free_bytes(text: str, free: str | None, *, total_bytes: int, idle_share: float) -> int:
    if free is None:
        return total_bytes - round(total_bytes * idle_share)
    written = _FREE.fullmatch(free)
    if not written:
        raise _error(
            text,
            f"{free!r} is not a size of free memory" if free else "no free memory after the colon",
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


_DATA = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
CATALOGUE: Mapping[str, Gpu] = MappingProxyType(
    {key: _gpu(key, row, _DATA["architectures"][row["architecture"]]) for key, row in _DATA["gpus"].items()}
)
