"""Machines that come and go, each a launch of its own on this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runner import ROOT, TINY, Runner

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 240
STEPS, EFFECTIVE = 100_000, 48
SLOW = """
import os, time
if "LOCAL_RANK" in os.environ:
    import train.loop
    original = train.loop.optimizer_step
    def optimizer_step(job, progress):
        time.sleep(0.05)
        return original(job, progress)
    train.loop.optimizer_step = optimizer_step
"""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Machine:
    """One launch; it ends with all its processes."""

    def __init__(self, runner: Runner, name: str) -> None:
        self.log = runner.folder / f"{name}.log"
        path = os.pathsep.join([str(runner.folder), str(ROOT)])
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "train", "--runs", str(runner.runs), "train"],
                cwd=ROOT,
                env=runner.environment() | {"PYTHONPATH": path},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, text: str) -> int:
        return self.log.read_text().count(text)


def test_a_machine_joins_and_dies_and_every_step_is_made_once(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    settings = {
        "CONFIG_DEVICE_CPU": "y",
        "CONFIG_DIST_NNODES": "1:2",
        "CONFIG_DIST_ENDPOINT": f"127.0.0.1:{free_port()}",
        "CONFIG_TARGET_EFFECTIVE_BATCH": str(EFFECTIVE),
        "CONFIG_MAX_STEPS": str(STEPS),
        "CONFIG_CHECKPOINT_INTERVAL_STEPS": "20",
        "CONFIG_LOG_INTERVAL_STEPS": "1",
        "CONFIG_EVAL_INTERVAL_STEPS": "100000",
    }
    runner.configure("lenet5", TINY | settings)
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    first = Machine(runner, "first")
    second = None
    try:
        wait_until(lambda: list(runner.runs.glob("*/*/ckpt/step-*")))
        second = Machine(runner, "second")
        together = f"{EFFECTIVE // 2} on each of 2 device(s), as asked"
        wait_until(lambda: first.said(together) + second.said(together))
        joined_after = steps_of(runner)
        wait_until(lambda: len(steps_of(runner)) > len(joined_after) + 30)
        os.killpg(second.process.pid, signal.SIGKILL)
        alone = f"{EFFECTIVE} on each of 1 device(s), as asked"
        wait_until(lambda: first.said(alone) >= 2)
        wait_until(lambda: first.said("First optimizer step") >= 3 - second.said("First optimizer step"))
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(PATIENCE_SECONDS) == 75, first.log.read_text()
    finally:
        for machine in filter(None, (first, second)):
            if machine.process.poll() is None:
                os.killpg(machine.process.pid, signal.SIGKILL)
                machine.process.wait()
    status = runner.newest().status()
    assert status.state == "preempted" and status.step > 20
    assert steps_of(runner) == list(range(1, status.step + 1)), "each once, none lost"
    assert len(list(runner.runs.glob("*/*"))) == 1


def steps_of(runner: Runner) -> list[int]:
    lines = runner.newest().metrics.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["step"] for row in rows if row["kind"] == "train"]
