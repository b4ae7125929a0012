"""The GPU catalogue: facts about a GPU from its name alone, read from `gpus.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from lib.errors import ConfigError

GpuKind: TypeAlias = Literal["cuda", "rocm", "mps"]
Format: TypeAlias = Literal["bf16", "fp16", "fp8"]

MAX_SUGGESTIONS = 3
VENDOR_WORDS = ("nvidia", "geforce", "tesla", "amd", "instinct", "apple")
PCIE_BYTES_PER_SECOND = 32e9  # PCIe 4.0 x16, one direction
FIGURES = {
    "total_bytes": "memory",
    "half_tflops": "16-bit peak",
    "fp32_tflops": "fp32 peak",
    "gb_per_s": "memory bandwidth",
}


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
        return f"{self.source}; by our own estimate its {guessed}" if guessed else self.source


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
        source=row["source"],
        estimated=tuple(row.get("estimated", ())),
    )


_DATA = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
CATALOGUE: Mapping[str, Gpu] = MappingProxyType(
    {key: _gpu(key, row, _DATA["architectures"][row["architecture"]]) for key, row in _DATA["gpus"].items()}
)
