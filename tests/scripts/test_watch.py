"""The table of running runs: what it reads, what it leaves alone, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import run_main
from lib.runs.directory import RunDir
from scripts import watch
from scripts.watch import Watcher, memory_text, progress
from tests.support.configs import ROOT

PLAN = {
    "device": "cuda",
    "memory": {"parts": {"weights": 2_000_000_000}, "reserve_bytes": 10**9, "usable_bytes": 10**10},
}


def train_row(step: int, *, seconds: float, **more: Any) -> dict[str, Any]:
    row = {"kind": "train", "step": step, "epoch": step / 50, "loss": 1 / step, "seconds": seconds}
    return {**row, "samples_per_second": 640.0, **more}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunDir]:
    """A locked run of a sweep: 40 of 100 steps, the last 20 rows at a second for each step."""
    run = RunDir.create(
        tmp_path / "sweeps" / "s" / "0a",
        model="lenet5",
        identity="0123abcd",
        files={"config": "", "values": {"BUDGET": "steps", "MAX_STEPS": 100}, "plan": PLAN},
    )
    rows = [train_row(step, seconds=step * 50.0) for step in range(1, 21)]
    rows.append({"kind": "eval", "step": 20, "epoch": 0.4, "accuracy": 0.75, "loss": 0.5})
    rows += [train_row(step, seconds=1000.0 + step) for step in range(21, 41)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tra')
    yield run
    run.release()


def test_a_run_of_a_sweep_is_shown_with_the_time_that_its_recent_speed_leaves(
    tmp_path: Path, running: RunDir
) -> None:
    head, line = Watcher(tmp_path).lines()
    assert head.split() == [
        "state",
        "model",
        "step",
        "loss",
        "metric",
        "samples/s",
        "memory",
        "time",
        "left",
        "run",
    ]
    assert line.split() == [
        *("running", "lenet5", "40/100", "0.025", "accuracy", "0.75", "640"),
        *("plan", "3.00", "GB", "0:01:00", running.name),
    ]


def test_what_ended_before_is_left_alone_and_what_ends_now_keeps_its_state(
    tmp_path: Path, running: RunDir
) -> None:
    done = RunDir.create(tmp_path, model="lenet5", identity="00000001", files={"config": ""})
    done.set_status("done", step=7)
    watcher = Watcher(tmp_path)
    assert len(watcher.lines()) == 2
    running.release()
    assert "killed" in watcher.lines()[1]
    running.set_status("done", step=100)
    line = watcher.lines()[1]
    assert line.split()[:3] == ["done", "lenet5", "40/100"] and "1:00" not in line and "GB" not in line
    assert Watcher(tmp_path).lines() == [f"No run in {tmp_path} is running."]
    done.set_status("running", step=7)  # it is resumed, and still locked
    assert [row.split()[2] for row in watcher.lines()[1:]] == ["7", "40/100"]
    done.release()


def test_only_the_end_of_a_file_is_read(running: RunDir, tmp_path: Path) -> None:
    tail = running.metrics.read_bytes()
    with running.metrics.open("wb") as file:
        file.seek(20 * 10**9)  # a hole: nothing is written
        file.write(b"\n" + tail)
    assert "40/100" in Watcher(tmp_path).lines()[1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"BUDGET": "steps", "MAX_STEPS": 50}, (50, 40.0)),
        ({"BUDGET": "epochs", "NUM_EPOCHS": 2}, (100, 140.0)),
        ({"BUDGET": "epochs", "NUM_EPOCHS": 0.5}, (25, 0.0)),
        ({"BUDGET": "seconds", "MAX_SECONDS": 90}, (None, 30.0)),
        ({}, (None, None)),
    ],
)
def test_time_left_is_that_of_the_budget(values: dict[str, Any], expected: tuple[Any, Any]) -> None:
    trained = [train_row(10, seconds=20.0), train_row(30, seconds=60.0)]
    steps, seconds = progress(values, trained)
    assert (steps, seconds) == (expected[0], expected[1] and pytest.approx(expected[1]))
    assert progress(values, []) == (None, None)
    assert progress(values, trained[:1])[1] is None


def test_memory_is_what_the_run_has_measured_or_else_planned() -> None:
    assert memory_text({"peak_memory_bytes": 250_000_000}, PLAN) == "0.25 GB"
    assert memory_text({}, PLAN) == "plan 3.00 GB"
    assert memory_text({}, {"device": "cpu", "memory": None}) == ""


def test_without_a_terminal_the_table_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["watch", "--runs", str(tmp_path)])
    assert run_main(watch.main) == 0
    assert capsys.readouterr().out == f"No run in {tmp_path} is running.\n"


@pytest.mark.slow
def test_on_a_terminal_it_follows_until_an_interrupt(tmp_path: Path, running: RunDir) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "scripts.watch", "--runs", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=environment)
    signal.signal(signal.SIGINT, before)
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while b"40/100" not in shown and time.monotonic() < deadline:
            shown += os.read(ours, 4096)
        running.metrics.write_text(json.dumps(train_row(77, seconds=2000.0)) + "\n")
        while b"77/100" not in shown and time.monotonic() < deadline:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO once it has ended: unread, its last lines would keep it
            while select.select([ours], [], [], 30)[0] and os.read(ours, 4096):
                pass
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
    assert b"77/100" in shown and b"Traceback" not in shown
    os.close(ours)
