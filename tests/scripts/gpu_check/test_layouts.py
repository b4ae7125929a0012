"""Part 4 of the checks on real GPUs: real runs between CPU processes, and rows of what cannot run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import ToolkitError
from scripts import short_run as short_runs
from scripts.gpu_check import layouts, parts
from scripts.gpu_check.layouts import LAYOUT_CASES, LayoutCase, layout_row
from scripts.gpu_check.parts import Bench, part_4
from scripts.gpu_check.worker import Child
from scripts.short_run import short_run

TINY = {
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_GPT2_SIZE_CUSTOM": "y",
    "CONFIG_GPT2_LAYERS": "4",
    "CONFIG_GPT2_HEADS": "2",
    "CONFIG_GPT2_WIDTH": "32",
    "CONFIG_BLOCK_SIZE": "32",
    "CONFIG_HOLDOUT": "64",
    "CONFIG_OPTIMIZER_ADAMW": "y",
    "CONFIG_TARGET_EFFECTIVE_BATCH": "14",
    "CONFIG_MAX_STEPS": "3",
}
PLAN = {
    "strategy": "ddp",
    "world": 2,
    "shard": 1,
    "branch_devices": [],
    "micro_batch": 4,
    "accumulation": 1,
    "effective_batch": 8,
    "memory": {"parts": {"parameters": 30, "activations": 12}},
}


def rows_of_part_4(folder: Path, *, devices: int, seconds: float = 500) -> list[dict[str, Any]]:
    with (folder / "rows").open("a") as file, Child(log=subprocess.DEVNULL) as child:
        part_4(Bench(file, child, part=4, seconds=seconds), devices=devices)
    return [json.loads(line) for line in (folder / "rows").read_text().splitlines()]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs are played: losses by strategy; an error in place of them is raised."""
    losses: dict[str, Any] = {}

    def short_run(_: str, settings: Any, *, folder: Path, seconds: float) -> Any:
        assert 0 < seconds <= layouts.RUN_SECONDS and settings["CONFIG_NUM_DEVICES"].isdigit()
        found = losses.get(folder.name, [2.0, 1.0])
        if isinstance(found, ToolkitError):
            raise found
        return SimpleNamespace(losses=found, read_json=lambda _: PLAN)

    def rows_of(run: Any, kind: str) -> list[dict[str, Any]]:
        if kind == "speed":
            return [{"most_samples_per_second": 80.0, "least_samples_per_second": 20.0}]
        return [{"loss": loss, "samples_per_second": 16.0, "peak_memory_bytes": 40} for loss in run.losses]

    monkeypatch.setattr(layouts, "short_run", short_run)
    monkeypatch.setattr(layouts, "rows_of", rows_of)
    return losses


def test_one_device_has_rows_for_what_it_cannot_run(played: dict[str, Any], tmp_path: Path) -> None:  # noqa: ARG001
    rows = rows_of_part_4(tmp_path, devices=1)
    assert {row["kind"] for row in rows} == {"layout"}
    statuses = {row["strategy"]: row["status"] for row in rows}
    assert statuses.pop("single") == statuses.pop("sequential", "ok") == "ok"
    assert {*statuses.values()} == {"too_few_devices"}
    assert {row["strategy"]: row["least"] for row in rows if "least" in row}["hsdp"] == 4
    assert {*statuses} | {"sequential"} >= {name for case in LAYOUT_CASES[:1] for name in case.strategies}


def test_losses_bytes_and_seconds_are_compared(played: dict[str, Any], tmp_path: Path) -> None:
    played |= {"fsdp": [2.0, 1.5], "zero1": ToolkitError("it failed"), "ddp": [2.0, 1.0005]}
    rows = {row["strategy"]: row for row in rows_of_part_4(tmp_path, devices=5) if row["case"] == "gpt2-tiny"}
    assert (rows["single"]["devices"], rows["ddp"]["devices"], rows["hsdp"]["devices"]) == (1, 5, 4)
    assert (rows["fsdp"]["difference"], rows["fsdp"]["alike"]) == (0.5, False)
    assert rows["ddp"]["difference"] == pytest.approx(5e-4) and rows["ddp"]["alike"]
    assert (rows["zero1"]["status"], rows["zero1"]["reason"]) == ("failed", "it failed")
    assert (rows["ddp"]["step_seconds"], rows["ddp"]["estimated_seconds"]) == (0.5, [0.1, 0.4])
    assert (rows["ddp"]["peak_bytes"], rows["ddp"]["predicted_bytes"]) == (40, 42)
    assert rows["single"]["alike"] is None, "there is nothing to compare it with"


def test_without_a_run_on_one_device_nothing_is_called_alike(played: dict[str, Any], tmp_path: Path) -> None:
    played["single"] = ToolkitError("it failed")
    rows = {row["strategy"]: row for row in rows_of_part_4(tmp_path, devices=2) if row["case"] == "gpt2-tiny"}
    assert rows["fsdp"]["status"] == "ok" and rows["fsdp"]["difference"] is rows["fsdp"]["alike"] is None


def test_what_there_was_no_time_for_is_told(played: dict[str, Any], tmp_path: Path) -> None:  # noqa: ARG001
    rows = rows_of_part_4(tmp_path, devices=2, seconds=0)
    assert {row["kind"] for row in rows} == {"out_of_time"} and "single" in rows[0]["left_out"]


@pytest.mark.long
@pytest.mark.slow
def test_four_processes_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies chosen by hand on the command line, between CPU processes."""
    case = LayoutCase("gpt2-tiny", TINY, strategies=("hsdp", "pipeline"))
    monkeypatch.setattr(parts, "shipped_cases", lambda: [case])
    rows = {row["strategy"]: row for row in rows_of_part_4(tmp_path, devices=4)}
    for strategy, shard in (("hsdp", 2), ("pipeline", 4)):
        row = rows[strategy]
        assert row["status"] == "ok", row
        planned = row["planned"]
        assert (planned["strategy"], planned["world"], planned["shard"]) == (strategy, 4, shard)
        assert row["alike"] and row["difference"] < 1e-6 and len(row["losses"]) == 3
        assert row["step_seconds"] > 0 and row["peak_bytes"] > 0 and row["predicted_bytes"] > 0


def test_a_run_that_fails_or_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(program: str) -> None:
        monkeypatch.setattr(short_runs, "TRAIN", (sys.executable, "-c", program))

    train("import sys; sys.exit('some line\\nerror: the reason')")
    with pytest.raises(ToolkitError, match="training lenet5 failed: the reason"):
        short_run("lenet5", {}, folder=tmp_path)
    started, popen = list[subprocess.Popen[str]](), subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(short_runs.subprocess, "Popen", start)
    train("import time; time.sleep(600)")
    with pytest.raises(ToolkitError, match=r"training lenet5 was stopped after 0.5 s"):
        short_run("lenet5", {}, folder=tmp_path, seconds=0.5)
    assert started[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_row_names_its_devices(played: dict[str, Any], tmp_path: Path) -> None:  # noqa: ARG001
    case = LayoutCase("gpt2-tiny", {}, strategies=())
    row = layout_row(case, "hsdp", devices=7, one=[2.0, 1.0], folder=tmp_path, seconds=1)
    assert (row["devices"], row["status"]) == (6, "ok")
