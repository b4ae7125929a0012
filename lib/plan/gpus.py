"""The GPU catalogue: facts about a GPU from its name alone. Data and look-up only.

Memory is what the driver reports to a program (`cudaMemGetInfo`), not what the box or nvidia-smi says, and
differs by up to 2 % between drivers. Rates are peaks from the vendor's papers: dense (no structured
sparsity), products of 16-bit numbers accumulated in fp32 as PyTorch does, which GeForce cards do at half the
rate of fp16 accumulation. `Gpu.estimated` names the figures that come from no such source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal, TypeAlias

from lib.errors import ConfigError

GpuKind: TypeAlias = Literal["cuda", "rocm", "mps"]
Format: TypeAlias = Literal["bf16", "fp16", "fp8"]

MOST_SUGGESTIONS = 3
VENDOR_WORDS = ("nvidia", "geforce", "tesla", "amd", "instinct", "apple")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model of the catalogue."""

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
    source: str
    estimated: tuple[str, ...]  # fields that neither a paper nor a driver reports

    @property
    def memory(self) -> str:
        """Memory in decimal GB and in GiB."""
        return f"{self.total_bytes / 1e9:.1f} GB ({self.total_bytes / 2**30:.1f} GiB)"

    @property
    def origin(self) -> str:
        """Source of the figures, and which of them are estimates."""
        guessed = ", ".join(_IN_WORDS[name] for name in self.estimated)
        return f"{self.source}; by our own estimate its {guessed}" if guessed else self.source


def find_gpu(driver_name: str) -> Gpu | None:
    """Return the row for a device's name as its driver reports it; None if it is not in the catalogue.

    Only whole names match: an "RTX 3090 Ti" or a MIG slice of another size is not taken for its neighbour.
    The memory of the row is that of one such GPU; a device that is present reports its own.
    """
    wanted = _without_vendor(driver_name)
    for gpu in CATALOGUE.values():
        spellings = (_without_vendor(gpu.name), *gpu.patterns)
        if any(fnmatchcase(wanted, spelling) for spelling in spellings):
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
    wanted = _letters(text)
    keys = {_letters(key): key for key in CATALOGUE}
    if len(wanted) > 1:
        near = [key for letters, key in keys.items() if letters.startswith(wanted)]
        if near:
            return tuple(near[:MOST_SUGGESTIONS])
    import difflib  # only after an error: the import is slow

    return tuple(keys[letters] for letters in difflib.get_close_matches(wanted, keys, n=2, cutoff=0.6))


def _without_vendor(name: str) -> str:
    """Return a driver's name in lower case, without vendor words, which vary with the driver's version."""
    words = name.lower().split()
    while words and words[0] in VENDOR_WORDS:
        words = words[1:]
    return " ".join(words)


def _letters(text: str) -> str:
    return "".join(character for character in _without_vendor(text) if character.isalnum())


@dataclass(frozen=True, slots=True)
class _Architecture:
    kind: GpuKind
    capability: tuple[int, int] | None
    formats: tuple[Format, ...]


_PASCAL = _Architecture("cuda", (6, 0), ())
_VOLTA = _Architecture("cuda", (7, 0), ("fp16",))
_TURING = _Architecture("cuda", (7, 5), ("fp16",))
_AMPERE = _Architecture("cuda", (8, 0), ("bf16", "fp16"))
_AMPERE_RTX = _Architecture("cuda", (8, 6), ("bf16", "fp16"))
_ADA = _Architecture("cuda", (8, 9), ("bf16", "fp16", "fp8"))
_HOPPER = _Architecture("cuda", (9, 0), ("bf16", "fp16", "fp8"))
_BLACKWELL = _Architecture("cuda", (10, 0), ("bf16", "fp16", "fp8"))
_BLACKWELL_RTX = _Architecture("cuda", (12, 0), ("bf16", "fp16", "fp8"))
_CDNA_2 = _Architecture("rocm", None, ("bf16", "fp16"))
_CDNA_3 = _Architecture("rocm", None, ("bf16", "fp16", "fp8"))
_RDNA_3 = _Architecture("rocm", None, ("bf16", "fp16"))
_APPLE = _Architecture("mps", None, ())

_MEMORY, _HALF, _FP32, _BANDWIDTH = (
    "total_bytes",
    "half_flop_per_second",
    "fp32_flop_per_second",
    "bandwidth_bytes_per_second",
)
_RATES = (_HALF, _FP32, _BANDWIDTH)
_IN_WORDS = {
    _MEMORY: "memory",
    _HALF: "16-bit peak",
    _FP32: "fp32 peak",
    _BANDWIDTH: "memory bandwidth",
}


def _gpu(
    key: str,
    name: str,
    architecture: _Architecture,
    *,
    total_bytes: int,
    rates: tuple[float | None, float, float],
    source: str,
    patterns: tuple[str, ...] = (),
    estimated: tuple[str, ...] = (),
) -> Gpu:
    """Make a row. rates: 16-bit and fp32 peaks in TFLOP/s, memory bandwidth in GB/s."""
    half_tflops, fp32_tflops, gb_per_second = rates
    return Gpu(
        key=key,
        name=name,
        patterns=patterns,
        kind=architecture.kind,
        capability=architecture.capability,
        formats=architecture.formats,
        total_bytes=total_bytes,
        half_flop_per_second=None if half_tflops is None else half_tflops * 1e12,
        fp32_flop_per_second=fp32_tflops * 1e12,
        bandwidth_bytes_per_second=gb_per_second * 1e9,
        source=source,
        estimated=estimated,
    )


# Bytes written in MiB were printed by PyTorch, the others by deviceQuery, or recorded under
# tests/fixtures/hardware. A MIG slice has 16 of 132 multiprocessors and an eighth of the memory bandwidth.
# fmt: off
_ROWS = (
    _gpu("b200", "NVIDIA B200", _BLACKWELL, total_bytes=191_513_886_720, rates=(2250, 80, 8000),
         source="Blackwell architecture brief, HGX B200"),
    _gpu("gh200-96g", "NVIDIA GH200 480GB", _HOPPER, total_bytes=102_005_473_280, rates=(989.4, 66.9, 4000),
         patterns=("gh200 120gb",), source="GH200 datasheet"),
    _gpu("h200", "NVIDIA H200", _HOPPER, total_bytes=150_113_943_552, rates=(989.4, 66.9, 4800),
         source="H200 datasheet"),
    _gpu("h100-80g", "NVIDIA H100 80GB HBM3", _HOPPER, total_bytes=84_942_979_072, rates=(989.4, 66.9, 3350),
         source="H100 datasheet, SXM"),
    _gpu("h100-pcie-80g", "NVIDIA H100 PCIe", _HOPPER, total_bytes=81_008 * 2**20, rates=(756.5, 51, 2000),
         source="H100 datasheet, PCIe"),
    _gpu("h100-nvl-94g", "NVIDIA H100 NVL", _HOPPER, total_bytes=99_961_274_368, rates=(835.5, 60, 3900),
         source="H100 datasheet, NVL"),
    _gpu("h100-mig-1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", _HOPPER, total_bytes=10_468_982_784,
         rates=(119.9, 8.1, 419), source="H100 datasheet, SXM", estimated=_RATES),
    _gpu("a100-40g", "NVIDIA A100-SXM4-40GB", _AMPERE, total_bytes=42_298_834_944, rates=(312, 19.5, 1555),
         patterns=("a100-sxm-40gb",), source="A100 datasheet, SXM"),
    _gpu("a100-80g", "NVIDIA A100-SXM4-80GB", _AMPERE, total_bytes=84_974_239_744, rates=(312, 19.5, 2039),
         patterns=("a100-sxm-80gb",), source="A100 datasheet, SXM"),
    _gpu("a100-pcie-40g", "NVIDIA A100-PCIE-40GB", _AMPERE, total_bytes=42_298_834_944,
         rates=(312, 19.5, 1555), source="A100 datasheet, PCIe"),
    _gpu("a100-pcie-80g", "NVIDIA A100 80GB PCIe", _AMPERE, total_bytes=84_974_239_744,
         rates=(312, 19.5, 1935), source="A100 datasheet, PCIe", estimated=(_MEMORY,)),
    _gpu("a40", "NVIDIA A40", _AMPERE_RTX, total_bytes=47_608_692_736, rates=(149.7, 37.4, 696),
         source="A40 datasheet"),
    _gpu("a10", "NVIDIA A10", _AMPERE_RTX, total_bytes=23_609_475_072, rates=(125, 31.2, 600),
         source="A10 datasheet"),
    _gpu("a10g", "NVIDIA A10G", _AMPERE_RTX, total_bytes=23_827_382_272, rates=(70, 35, 600),
         source="A10G datasheet"),
    _gpu("l40s", "NVIDIA L40S", _ADA, total_bytes=47_697_362_944, rates=(362, 91.6, 864),
         source="L40S datasheet"),
    _gpu("l4", "NVIDIA L4", _ADA, total_bytes=23_612_293_120, rates=(121, 30.3, 300),
         source="L4 datasheet"),
    _gpu("t4", "Tesla T4", _TURING, total_bytes=15_835_660_288, rates=(65, 8.1, 320),
         source="T4 datasheet"),
    _gpu("v100-16g", "Tesla V100-SXM2-16GB", _VOLTA, total_bytes=16_935_682_048, rates=(125, 15.7, 900),
         source="V100 datasheet, SXM2"),
    _gpu("v100-32g", "Tesla V100-SXM2-32GB", _VOLTA, total_bytes=34_089_730_048, rates=(125, 15.7, 900),
         source="V100 datasheet, SXM2"),
    _gpu("p100-16g", "Tesla P100-PCIE-16GB", _PASCAL, total_bytes=17_059_545_088, rates=(None, 9.3, 732),
         source="P100 datasheet, PCIe"),
    _gpu("rtxpro6000-96g", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", _BLACKWELL_RTX,
         total_bytes=97_250 * 2**20, rates=(503.8, 125, 1792),
         source="RTX PRO 6000 Blackwell datasheet", estimated=(_MEMORY, _HALF)),
    _gpu("rtx6000ada-48g", "NVIDIA RTX 6000 Ada Generation", _ADA, total_bytes=48_622 * 2**20,
         rates=(364.2, 91.1, 960), source="RTX 6000 Ada datasheet"),
    _gpu("a6000-48g", "NVIDIA RTX A6000", _AMPERE_RTX, total_bytes=48_676 * 2**20, rates=(154.8, 38.7, 768),
         source="RTX A6000 datasheet"),
    _gpu("rtx5090", "NVIDIA GeForce RTX 5090", _BLACKWELL_RTX, total_bytes=33_677_180_928,
         rates=(209.5, 104.8, 1792), source="RTX Blackwell architecture paper"),
    _gpu("rtx4090", "NVIDIA GeForce RTX 4090", _ADA, total_bytes=25_393_692_672, rates=(165.2, 82.6, 1008),
         source="Ada architecture paper"),
    _gpu("rtx4080", "NVIDIA GeForce RTX 4080", _ADA, total_bytes=16_049 * 2**20, rates=(97.5, 48.7, 716.8),
         source="Ada architecture paper"),
    _gpu("rtx3090", "NVIDIA GeForce RTX 3090", _AMPERE_RTX, total_bytes=25_447_170_048,
         rates=(71, 35.6, 936), source="GA102 architecture paper"),
    _gpu("rtx3080-10g", "NVIDIA GeForce RTX 3080", _AMPERE_RTX, total_bytes=10_472_390_656,
         rates=(59.5, 29.8, 760), source="GA102 architecture paper"),
    _gpu("rtx3060-12g", "NVIDIA GeForce RTX 3060", _AMPERE_RTX, total_bytes=12_044 * 2**20,
         rates=(25.4, 12.7, 360), source="GeForce RTX 3060 specifications", estimated=(_HALF,)),
    _gpu("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", _TURING, total_bytes=11_554_717_696,
         rates=(53.8, 13.4, 616), source="Turing architecture paper"),
    _gpu("rtx2060-6g", "NVIDIA GeForce RTX 2060", _TURING, total_bytes=6_225_002_496,
         rates=(25.8, 6.5, 336), source="GeForce RTX 2060 specifications", estimated=(_HALF,)),
    _gpu("mi325x", "AMD Instinct MI325X", _CDNA_3, total_bytes=262_128 * 2**20, rates=(1307.4, 163.4, 6000),
         source="MI325X datasheet", estimated=(_MEMORY,)),
    _gpu("mi300x", "AMD Instinct MI300X", _CDNA_3, total_bytes=206_141_652_992, rates=(1307.4, 163.4, 5300),
         source="MI300X datasheet"),
    _gpu("mi250x", "AMD Instinct MI250X", _CDNA_2, total_bytes=65_520 * 2**20, rates=(191.5, 47.9, 1638),
         patterns=("mi250x/mi250",), source="MI250X datasheet, one of its two dies"),
    _gpu("mi210", "AMD Instinct MI210", _CDNA_2, total_bytes=68_702_699_520, rates=(181, 45.3, 1638),
         source="MI210 datasheet"),
    _gpu("w7900", "AMD Radeon PRO W7900", _RDNA_3, total_bytes=51_522_830_336, rates=(122.6, 61.3, 864),
         source="Radeon PRO W7900 datasheet"),
    _gpu("rx7900xtx", "Radeon RX 7900 XTX", _RDNA_3, total_bytes=24_560 * 2**20, rates=(122.8, 61.4, 960),
         source="Radeon RX 7900 XTX specifications"),
    _gpu("m2-max", "Apple M2 Max", _APPLE, total_bytes=22_906_503_168, rates=(None, 13.6, 400),
         source="Apple's figures, 32 GiB machine"),
)
# fmt: on

CATALOGUE: Mapping[str, Gpu] = MappingProxyType({row.key: row for row in _ROWS})
