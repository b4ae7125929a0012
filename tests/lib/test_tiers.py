"""Compute tiers: the tier of each machine, and configurations that follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib import kconf
from lib.errors import ConfigError
from lib.plan.tables import TIER_CONFIGS
from lib.plan.types import Device, Hardware
from lib.tiers import TIERS, detect_compute_tier, tier_of, with_tier
from lib.units import GB
from tests.support.configs import load_hardware

ROOT = Path(__file__).resolve().parents[2]


def machine(*sizes_gb: float, name: str = "a GPU", kind: Any = "cuda") -> Hardware:
    devices = tuple(Device(name=name, total_bytes=round(gb * GB), free_bytes=0) for gb in sizes_gb)
    return Hardware(kind=kind, devices=devices, cpu_name="a processor", cpu_count=2)


@pytest.mark.parametrize(
    ("hardware", "tier"),
    [
        (load_hardware("cpu-256g"), 0),
        (machine(4.2), 0),
        (load_hardware("rtx2060-6g-x8"), 1),
        (load_hardware("h100-mig-1g.10gb"), 1),
        (machine(12.6, name="NVIDIA GeForce RTX 3060"), 1),
        (load_hardware("t4"), 2),
        (load_hardware("rtx3090"), 2),
        (load_hardware("m2-max"), 2),
        (load_hardware("a100-40g"), 3),
        (load_hardware("h100-80g-70g-free"), 3),
        (load_hardware("h200"), 3),
        (load_hardware("w7900"), 3),
        (machine(84.9, 84.9, 84.9, name="NVIDIA A100-SXM4-80GB"), 3),
        (machine(42.3, 42.3, 42.3, 42.3, name="NVIDIA A100-SXM4-40GB"), 4),
        (load_hardware("h100-80g-70g-free-x4"), 4),
        (machine(84.9, 84.9, 84.9, 8.4), 1),
        (machine(*[25.4] * 8, name="NVIDIA GeForce RTX 4090"), 2),
    ],
)
def test_a_machine_has_the_tier_of_its_smallest_device(hardware: Hardware, tier: int) -> None:
    found = tier_of(hardware)
    assert found.value == TIERS[tier] and found.reason


def test_this_machine_has_one() -> None:
    assert detect_compute_tier() in TIER_CONFIGS


@pytest.mark.parametrize("tier", ["2", "AUTO"])
def test_a_model_without_sizes_by_tier_refuses_a_tier(tier: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(f"CONFIG_MODEL_RESNET18=y\nCONFIG_TIER_{tier}=y\n")
    requested = kconf.load(root=ROOT, config_file=file)
    with pytest.raises(ConfigError, match=f"CONFIG_TIER_{tier}=y is not possible.*resnet18 has no sizes"):
        with_tier(requested, root=ROOT, log=lambda _: None)
