"""What a run measures before it trains, in real processes, and what becomes of a size that is too large."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lib import kconf
from lib.config import config_from_values
from lib.devices.probe import probe
from tests.e2e.runner import BRIEF, ROOT, Runner
from train.planning import autotune
from train.planning.autotune import ProbeTarget
from train.training_data import open_training_data

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_a_run_measures_first_and_the_plan_knows_it_afterwards(tmp_path: Path) -> None:
    runner, home = Runner(tmp_path), {"HOME": str(tmp_path)}
    steps = {"CONFIG_AUTO_METHOD_PROBE": "y", "CONFIG_MAX_STEPS": "2", "CONFIG_TARGET_EFFECTIVE_BATCH": "2"}
    runner.configure("lenet5", {**BRIEF, **steps, "CONFIG_DEVICE_CPU": "y"})
    output = runner.run("train", **home)
    assert "Probe run: micro-batch 2" in output
    assert "measured: samples/s" in (runner.newest().path / "log.txt").read_text()
    plan = json.loads((runner.newest().path / "plan.json").read_text())
    assert plan["effective_batch"] == 2 and "measured: " in plan["reasons"]["memory"]
    shown = runner.run("plan", "--json", **home)
    outlook = json.loads(shown[shown.index("{") :])
    assert outlook["method"] == "measured" and outlook["plan"]["micro_batch"] == plan["micro_batch"]
    assert "StepSettings" not in shown


@pytest.mark.long
def test_every_rank_is_tried_and_a_size_without_room_is_told(tmp_path: Path) -> None:
    empty = tmp_path / "config"
    empty.write_text("")
    chosen = {**BRIEF, "CONFIG_NUM_DEVICES": "2", "CONFIG_DEVICE_CPU": "y"}
    resolved = kconf.load(root=ROOT, config_file=empty, overrides=chosen)
    config, hardware = config_from_values(resolved.values), probe("cpu")
    data = open_training_data(config, root=ROOT, log=print)
    bench = ProbeTarget.of(resolved, data, hardware, root=ROOT)
    decided = bench.plan()
    assert decided.world == 2
    outcomes = autotune._run(bench, decided, usable_bytes=2 * 10**9)
    assert not isinstance(outcomes, str), outcomes
    assert len(outcomes) == 2 and all(each["step_seconds"] > 0 for each in outcomes)
    large = dataclasses.replace(
        decided, micro_batch=1024, last_micro_batch=1024, accumulation=1, effective_batch=2048
    )
    outcomes = autotune._run(bench, large, usable_bytes=50 * 10**6)
    assert isinstance(outcomes, str) and "memory" in outcomes
