"""make rerun: the same bits from a run's own configuration, and what is different is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runner import SHORT, Runner, assert_same_bits

pytestmark = pytest.mark.slow


def test_a_run_is_trained_again_by_its_own_configuration(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", SHORT | {"CONFIG_MAX_STEPS": "5", "CONFIG_SEED": "7"})
    runner.run("train", CONFIG_NUM_EPOCHS="3")  # of the environment: not used, and told
    first, weights = runner.newest(), runner.weights()
    # What is configured by now does not matter.
    runner.configure("lenet5", SHORT | {"CONFIG_MAX_STEPS": "6"})
    output = runner.run("rerun", first.name)
    again = runner.newest()
    assert again.path != first.path and again.identity == first.identity
    assert f"Different from {first.name}: nothing: versions, machine, code and plan are the same" in output
    assert_same_bits(weights, runner.weights())
    assert again.read_json("origins")["MAX_STEPS"].endswith("config:" + line_of(again.config, "MAX_STEPS=5"))

    environment = first.read_json("env") | {"torch": "2.11.0"}
    (first.path / "env.json").write_text(json.dumps(environment))
    output = runner.run("rerun", first.name)
    assert f"Different from {first.name}: env: torch 2.11.0 -> " in output


def test_a_plan_shows_what_was_asked_and_where(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", {})
    output = runner.run("plan", KCONFIG_MAKE_VARIABLES="CONFIG_SEED", CONFIG_SEED="7")
    requested = [line for line in output.splitlines() if line.startswith("requested: ")]
    line = line_of(tmp_path / ".config", "LEARNING_RATE=")
    assert f"requested: LEARNING_RATE = 0.012 ({tmp_path}/.config:{line})" in requested
    assert "requested: SEED = 7 (command line)" in requested
    assert not [text for text in requested if "MOMENTUM" in text or "MODEL_DATA_GRAY" in text]


def line_of(file: Path, text: str) -> str:
    lines = file.read_text().splitlines()
    return str(next(number for number, line in enumerate(lines, 1) if line.startswith(f"CONFIG_{text}")))
