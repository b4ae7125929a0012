"""XLA devices from the command to the last checkpoint, on a stand-in for torch_xla; and on the real one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.devices.base import Backend
from lib.runs import checkpoint
from tests.e2e.ddp_worker import CASES, outcome
from tests.e2e.runner import BRIEF, Runner
from tests.e2e.workers import run_worker
from tests.e2e.xla_worker import NAMES
from tests.support.once import made_once
from tests.support.stubbed import XLA_STUB
from tests.support.training import largest_difference

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXACT = 1e-12  # of weights, in float64; sums of an evaluation are float32 there
HAS_TORCH_XLA = importlib.util.find_spec("torch_xla") is not None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = made_once(tmp_path_factory, "xla", trained_by_two)
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def trained_by_two(directory: Path) -> None:
    run_worker("xla_worker", directory)


@pytest.mark.parametrize("name", NAMES)
def test_two_devices_train_what_one_processor_trains(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = outcome(CASES[name], Backend("cpu"))
    for rank in ranks:
        found = rank["cases"][name]
        assert largest_difference(expected["model"], found["model"]) <= EXACT
        assert found["result"] == pytest.approx(expected["result"], rel=1e-6)
    if expected["carry"]:
        assert largest_difference(expected["carry"], ranks[0]["cases"][name]["carry"]) <= EXACT


def test_they_begin_with_the_weights_of_the_first(ranks: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    first = torch.nn.Linear(3, 2).weight
    assert all(torch.equal(rank["first"], first) for rank in ranks)


def test_they_ask_for_the_same_in_the_same_order(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["calls"] == ranks[1]["calls"]
    assert {"rendezvous", "device", "sync"} <= set(ranks[0]["calls"])


def runner_in(tmp_path: Path) -> Runner:
    runner = Runner(tmp_path)
    runner.configure("lenet5", {**BRIEF, "CONFIG_MAX_STEPS": "4", "CONFIG_DEVICE_XLA": "y"})
    return runner


def test_a_run_on_one_device(tmp_path: Path) -> None:
    runner = runner_in(tmp_path)
    place = {"PYTHONPATH": str(XLA_STUB), "STUB_DEVICES": "1", "STUB_DEVICE": "CPU"}
    output = runner.run("train", **place)
    run = runner.newest()
    assert "EXPERIMENTAL, never run on TPU hardware" in " ".join(output.split())
    assert run.status().state == "done"
    plan = run.read_json("plan")
    assert (plan["device"], plan["world"], plan["precision"]) == ("xla", 1, "fp32")
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert trained and {(row["compilations"], row["compile_seconds"]) for row in trained} == {(2, 3.0)}
    found = checkpoint.load(run.checkpoints, log=print)
    assert found is not None and found[0] == 4


@pytest.mark.skipif(not HAS_TORCH_XLA, reason="torch_xla is not installed: nothing was run on the real one")
def test_a_run_on_the_real_torch_xla(tmp_path: Path) -> None:
    runner = runner_in(tmp_path)
    process = subprocess.run(
        [sys.executable, "-m", "train", "--runs", str(runner.runs), "train"],
        cwd=ROOT,
        env=runner.environment() | {"PJRT_DEVICE": "CPU"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    assert runner.newest().status().state == "done"
