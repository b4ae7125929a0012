"""What a compute tier makes of the looped transformer, whose sizes follow it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lib import kconf
from lib.errors import ConfigError, PlanError
from lib.plan.gpus import parse_gpu
from lib.plan.tables import TIER_CONFIGS
from lib.tiers import TIERS, with_tier
from train.planning import command as planning

ROOT = Path(__file__).resolve().parents[3]


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
    requested = resolved("CONFIG_LOOPED_HIDDEN=99", "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    said: list[str] = []
    found = with_tier(requested, root=ROOT, log=said.append, hardware=parse_gpu("rtx3090"))
    assert re.fullmatch(r"Compute tier: TIER_2_PROSUMER \(1 GPU.*\)", said[0])
    assert (found.values["TIER"], found.values["LOOPED_WIDTH"], found.values["LOOPED_HIDDEN"]) == (
        "2",
        128,
        99,
    )
    assert found.values["DATASET"] == "cifar10" and "CONFIG_TIER_2=y" in found.minimal
    assert (
        found.origins["LOOPED_HIDDEN"] == requested.origins["LOOPED_HIDDEN"] != found.origins["LOOPED_WIDTH"]
    )
    assert "TIER_2_PROSUMER" in found.origins["LOOPED_WIDTH"]
    fixed = dataclasses.replace(requested, values={**requested.values, "TIER": "none"})
    assert with_tier(fixed, root=ROOT, log=said.append) is fixed and len(said) == 1


def test_what_was_set_to_what_it_is_without_a_tier_stays(tmp_path: Path) -> None:
    lines = "CONFIG_LOOPED_WIDTH=32", "CONFIG_DATASET_DIGITS=y", "CONFIG_LOOPED_INPUT_IMAGES=y"
    requested = resolved(*lines, "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    found = with_tier(requested, root=ROOT, log=lambda _: None, hardware=parse_gpu("h100-80g"))
    kept = {name: found.values[name] for name in ("TIER", "LOOPED_WIDTH", "DATASET", "LOOPED_HEADS")}
    assert kept == {"TIER": "3", "LOOPED_WIDTH": 32, "DATASET": "digits", "LOOPED_HEADS": 8}
    assert found.origins["LOOPED_WIDTH"] == requested.origins["LOOPED_WIDTH"]


def test_what_was_set_and_does_not_go_with_the_tier_is_told(tmp_path: Path) -> None:
    requested = resolved("CONFIG_LOOPED_PATCH=7", "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    with pytest.raises(ConfigError) as caught:
        with_tier(requested, root=ROOT, log=lambda _: None, hardware=parse_gpu("h100-80g"))
    told = caught.value.findings[0]
    assert told.startswith(
        f"{tmp_path / 'config'}:3: CONFIG_LOOPED_PATCH=7 has no effect: it needs CONFIG_LOOPED_IN"
    )


def test_a_tier_that_is_left_open_may_have_a_directory_of_data(tmp_path: Path) -> None:
    """Every tier has a data set of files."""
    requested = resolved('CONFIG_DATA_DIR="elsewhere"', "CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    for gpu in ("cpu-24g", "rtx3090", "h100-80g", "h100-80gx4"):
        found = with_tier(requested, root=ROOT, log=lambda _: None, hardware=parse_gpu(gpu))
        assert found.values["DATA_DIR"] == "elsewhere"


def test_machines_are_not_compared_by_a_configuration_that_differs(tmp_path: Path) -> None:
    requested = resolved("CONFIG_TIER_AUTO=y", tmp_path=tmp_path)
    with pytest.raises(PlanError, match="another configuration on each machine"):
        planning.plan(requested, root=ROOT, gpu="all", as_json=True)
