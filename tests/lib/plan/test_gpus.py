"""The catalogue of GPUs: names are found and not confused, figures are possible and agree with each other."""

from __future__ import annotations

import re

import pytest

from lib.errors import ConfigError
from lib.plan.gpus import CATALOGUE, FIGURES, Gpu, find_gpu, gpu_of
from lib.plan.tables import BF16_CAPABILITY, BF16_ROCM_PATTERNS, FP16_CAPABILITY
from lib.plan.types import Device
from tests.support.configs import hardware_names, load_hardware

FP8_CAPABILITY = (8, 9)
ROWS = pytest.mark.parametrize("gpu", CATALOGUE.values(), ids=lambda gpu: gpu.key)


def recorded_gpus() -> list[tuple[str, Device]]:
    machines = [load_hardware(name) for name in hardware_names()]
    devices = {device.name: (machine.kind, device) for machine in machines for device in machine.devices}
    return [(kind, device) for kind, device in devices.values() if kind not in ("cpu", "xla")]


def test_every_recorded_gpu_is_found_with_its_memory() -> None:
    found = 0
    for kind, device in recorded_gpus():
        if device.name == "AMD Radeon Graphics":  # what a driver calls any GPU inside a processor
            assert find_gpu(device.name) is None
            continue
        gpu = find_gpu(device.name)
        assert gpu is not None, device.name
        assert (gpu.kind, gpu.capability, gpu.total_bytes) == (kind, device.capability, device.total_bytes)
        assert "total_bytes" not in gpu.estimated
        found += 1
    assert found == 18


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("GeForce RTX 3090", "rtx3090"),
        ("nvidia geforce rtx 3090", "rtx3090"),
        ("A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM-80GB", "a100-80g"),
        ("NVIDIA Tesla V100-SXM2-16GB", "v100-16g"),
        ("AMD Instinct MI250X/MI250", "mi250x"),
        ("AMD Radeon RX 7900 XTX", "rx7900xtx"),
        ("NVIDIA GH200 120GB", "gh200-96g"),
    ],
)
def test_other_spellings_of_a_driver(name: str, key: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None and gpu.key == key


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 2g.20gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A1000",
        "NVIDIA L40",
        "Apple M2",
        "Intel(R) Arc(TM) A770",
    ],
)
def test_a_neighbour_is_not_taken_for_it(name: str) -> None:
    assert find_gpu(name) is None


@ROWS
def test_a_row_is_found_by_its_name_and_by_its_key(gpu: Gpu) -> None:
    assert find_gpu(gpu.name) is find_gpu(gpu.name.upper()) is gpu
    assert gpu_of(gpu.key) is gpu_of(gpu.key.upper()) is gpu
    assert re.fullmatch(r"[a-z0-9]+(?:[-.][a-z0-9]+)*", gpu.key)


@ROWS
def test_a_row_is_possible(gpu: Gpu) -> None:
    assert 5e9 < gpu.total_bytes < 300e9
    assert 200e9 < gpu.bandwidth_bytes_per_second < 9e12
    assert 5e12 < gpu.fp32_flop_per_second < 200e12
    size = re.search(r"-([0-9]+)g$", gpu.key)
    if size:  # what is printed on the box, less what the driver keeps
        assert 0.94 < gpu.total_bytes / (int(size[1]) * 2**30) <= 1
    printed = re.search(r"\b([0-9]+)GB\b", gpu.name)
    if printed and gpu.key != "gh200-96g" and "MIG" not in gpu.name:  # that one names its main memory
        assert 0.94 < gpu.total_bytes / (int(printed[1]) * 2**30) <= 1
    assert gpu.source
    assert set(gpu.estimated) <= set(FIGURES)


@ROWS
def test_arithmetic_agrees_with_the_formats(gpu: Gpu) -> None:
    assert (gpu.half_flop_per_second is None) == (not gpu.formats)
    if gpu.half_flop_per_second is None:
        return
    # Matrix units are 2 to 30 times the rest, and in balance with their memory, on every generation so far.
    assert 1.9 < gpu.half_flop_per_second / gpu.fp32_flop_per_second < 30
    balance = gpu.half_flop_per_second / gpu.bandwidth_bytes_per_second
    assert 50 < balance < (600 if gpu.kind == "tpu" else 450)  # v6e has most arithmetic for its memory


@ROWS
def test_formats_agree_with_what_planning_goes_by(gpu: Gpu) -> None:
    if gpu.kind == "cuda":
        assert gpu.capability is not None
        assert ("bf16" in gpu.formats) == (gpu.capability >= BF16_CAPABILITY)
        assert ("fp16" in gpu.formats) == (gpu.capability >= FP16_CAPABILITY)
        assert ("fp8" in gpu.formats) == (gpu.capability >= FP8_CAPABILITY)
    else:
        assert gpu.capability is None
        planned = gpu.kind == "tpu" or any(pattern in gpu.name.upper() for pattern in BF16_ROCM_PATTERNS)
        assert planned == ("bf16" in gpu.formats)


def test_memory_is_shown_in_both_units() -> None:
    assert gpu_of("h100-80g").memory == "84.9 GB (79.1 GiB)"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("h100", "h100-80g or h100-pcie-80g or h100-nvl-94g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("rtx-3090", "rtx3090"),
        ("rtx3091", "rtx3090"),
        ("GeForce RTX 2060", "rtx2060-6g"),
        ("mi300", "mi300x"),
        ("l40s-48g", "l40s"),
        ("b20", "b200"),
        ("tesla t4", "t4"),
    ],
)
def test_an_unknown_key_is_told_which_was_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gpu_of(key)
    assert meant in caught.value.todo


def test_a_key_like_no_other_is_shown_the_way() -> None:
    for key in ("", "?", "voodoo5"):
        with pytest.raises(ConfigError, match="GPU=all shows what there is"):
            gpu_of(key)
