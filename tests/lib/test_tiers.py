"""Compute tiers: which machine is of which, and what a configuration makes of one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from lib import kconf
from lib.errors import ConfigError, PlanError
from lib.plan.assumed import parse_gpu
from lib.plan.tables import TIER_CONFIGS
from lib.plan.types import Device, Hardware
from lib.tiers import TIERS, detect_compute_tier, tier_of, with_tier
from lib.units import GB
from tests.support.configs import load_hardware
from train.planning import command as planning

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


def resolved(*lines: str, tmp_path: Path) -> kconf.Resolved:
    file = tmp_path / "config"
    file.write_text("\n".join(("# A test.", "CONFIG_MODEL_LOOPED=y", *lines)) + "\n")
    return kconf.load(root=ROOT, config_file=file)


@pytest.mark.parametrize("number", range(5))
def test_the_defaults_of_a_tier_are_those_of_its_table(number: int, tmp_path: Path) -> None:
    table, found = TIER_CONFIGS[TIERS[number]], resolved(f"CONFIG_TIER_{number}=y", tmp_path=tmp_path).values
    names = {"d_model": "WIDTH", "n_heads": "HEADS", "d_ff": "HIDDEN", "max_iters": "MAX_ITERATIONS"}
    for column, name in {**names, "damping": "STEP_SIZE"}.items():
        assert found[f"LOOPED_{name}"] == table[column], column
    assert found["RECOMMENDED_TARGET"] == table["batch_size"] * table.get("grad_accum", 1)
    assert found["LOOPED_TOGETHER"] == table.get("parallel_solver", False)
    subset = "_subset" if found["DATA_LIMIT"] == 1000 else ""
    assert f"{found['DATASET']}{subset}" == table["dataset"]
    assert (found["PRECISION"] == "auto") == table["mixed_precision"]


def test_what_was_set_stays(tmp_path: Path) -> None:
    found = resolved(
        "CONFIG_LOOPED_WIDTH=48", "CONFIG_DATASET_DIGITS=y", "CONFIG_TIER_2=y", tmp_path=tmp_path
    )
    assert (found.values["LOOPED_WIDTH"], found.values["DATASET"]) == (48, "digits")
    assert found.values["LOOPED_HIDDEN"] == 512


def test_a_tier_that_is_left_open_is_the_machines(tmp_path: Path) -> None:
    asked = resolved("CONFIG_LOOPED_HIDDEN=99", "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    said: list[str] = []
    found = with_tier(asked, root=ROOT, say=said.append, hardware=parse_gpu("rtx3090"))
    assert re.fullmatch(r"Compute tier: TIER_2_PROSUMER \(1 GPU.*\)", said[0])
    assert (found.values["TIER"], found.values["LOOPED_WIDTH"], found.values["LOOPED_HIDDEN"]) == (
        "2",
        128,
        99,
    )
    assert found.values["DATASET"] == "cifar10" and "CONFIG_TIER_2=y" in found.minimal
    assert found.origins["LOOPED_HIDDEN"] == asked.origins["LOOPED_HIDDEN"] != found.origins["LOOPED_WIDTH"]
    assert "TIER_2_PROSUMER" in found.origins["LOOPED_WIDTH"]
    fixed = dataclasses.replace(asked, values={**asked.values, "TIER": "none"})
    assert with_tier(fixed, root=ROOT, say=said.append) is fixed and len(said) == 1


def test_what_was_set_to_what_it_is_without_a_tier_stays(tmp_path: Path) -> None:
    lines = "CONFIG_LOOPED_WIDTH=32", "CONFIG_DATASET_DIGITS=y", "CONFIG_LOOPED_INPUT_IMAGES=y"
    asked = resolved(*lines, "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    found = with_tier(asked, root=ROOT, say=lambda _: None, hardware=parse_gpu("h100-80g"))
    kept = {name: found.values[name] for name in ("TIER", "LOOPED_WIDTH", "DATASET", "LOOPED_HEADS")}
    assert kept == {"TIER": "3", "LOOPED_WIDTH": 32, "DATASET": "digits", "LOOPED_HEADS": 8}
    assert found.origins["LOOPED_WIDTH"] == asked.origins["LOOPED_WIDTH"]


def test_what_was_set_and_does_not_go_with_the_tier_is_told(tmp_path: Path) -> None:
    asked = resolved("CONFIG_LOOPED_PATCH=7", "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    with pytest.raises(ConfigError) as caught:
        with_tier(asked, root=ROOT, say=lambda _: None, hardware=parse_gpu("h100-80g"))
    told = caught.value.findings[0]
    assert told.startswith(
        f"{tmp_path / 'config'}:3: CONFIG_LOOPED_PATCH=7 has no effect: it needs CONFIG_LOOPED_IN"
    )


def test_a_tier_that_is_left_open_may_have_a_directory_of_data(tmp_path: Path) -> None:
    """Every tier has a data set of files."""
    asked = resolved('CONFIG_DATA_DIR="elsewhere"', "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    for gpu in ("cpu-24g", "rtx3090", "h100-80g", "h100-80gx4"):
        found = with_tier(asked, root=ROOT, say=lambda _: None, hardware=parse_gpu(gpu))
        assert found.values["DATA_DIR"] == "elsewhere"


@pytest.mark.parametrize("tier", ["2", "AUTO"])
def test_a_model_without_sizes_by_tier_refuses_a_tier(tier: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(f"CONFIG_MODEL_RESNET18=y\nCONFIG_TIER_{tier}=y\n")
    asked = kconf.load(root=ROOT, config_file=file)
    with pytest.raises(ConfigError, match=f"CONFIG_TIER_{tier}=y cannot be honoured.*resnet18 has no sizes"):
        with_tier(asked, root=ROOT, say=lambda _: None)


def test_machines_are_not_compared_by_a_configuration_that_differs(tmp_path: Path) -> None:
    asked = resolved("CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    with pytest.raises(PlanError, match="another configuration on each machine"):
        planning.plan(asked, root=ROOT, gpu="all", as_json=True)
