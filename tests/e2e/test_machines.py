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

from lib import checkpoint
from tests.e2e.runner import ROOT, TINY, Runner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for ports in /proc"),
]

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


def listening(port: int) -> bool:
    """Whether somebody accepts connections there; asking by one would be in the way."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    found = (line.split()[1:4] for line in lines)  # its own address, the other's, a state
    return any(state == "0A" and int(own.rpartition(":")[2], 16) == port for own, _, state in found)


def test_a_machine_joins_and_dies_and_every_step_is_made_once(tmp_path: Path) -> None:
    """Two machines, then three, then two; then the one that they meet at is told to go."""
    runner, port = Runner(tmp_path), free_port()
    settings = {
        "CONFIG_DEVICE_CPU": "y",
        "CONFIG_DIST_NNODES": "2:3",
        "CONFIG_DIST_ENDPOINT": f"127.0.0.1:{port}",
        "CONFIG_TARGET_EFFECTIVE_BATCH": str(EFFECTIVE),
        "CONFIG_MAX_STEPS": str(STEPS),
        "CONFIG_CHECKPOINT_INTERVAL_STEPS": "20",
        "CONFIG_LOG_INTERVAL_STEPS": "1",
        "CONFIG_EVAL_INTERVAL_STEPS": "100000",
    }
    runner.configure("lenet5", TINY | settings)
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    machines = [Machine(runner, "host")]

    def said(text: str) -> int:
        return sum(machine.said(text) for machine in machines)

    try:
        wait_until(lambda: listening(port))
        machines.append(Machine(runner, "stays"))
        wait_until(lambda: list(runner.runs.glob("*/*/ckpt/step-*")))
        machines.append(Machine(runner, "comes"))
        wait_until(lambda: said(f"{EFFECTIVE // 3} on each of 3 device(s), as asked"))
        wait_for_steps(runner, 30)
        host, stays, comes = machines
        os.killpg(comes.process.pid, signal.SIGKILL)
        wait_until(lambda: said(f"{EFFECTIVE // 2} on each of 2 device(s), as asked") >= 2)
        wait_for_steps(runner, 30)
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(PATIENCE_SECONDS) == 75, host.log.read_text()
        assert stays.process.wait(PATIENCE_SECONDS) == 75, stays.log.read_text()
    finally:
        for machine in machines:
            if machine.process.poll() is None:
                os.killpg(machine.process.pid, signal.SIGKILL)
                machine.process.wait()
    status = runner.newest().status()
    assert status.state == "preempted" and status.step > 20
    assert steps_of(runner) == list(range(1, status.step + 1)), "each once, none lost"
    assert len(list(runner.runs.glob("*/*"))) == 1
    assert checkpoint.steps(runner.newest().checkpoints)[-1] == status.step, "it goes on from there"
    output = stays.log.read_text()
    assert output.splitlines()[-1].startswith("error: the other machines are gone, or too few: "), output
    assert "frame #" not in output and "Traceback" not in output, output


def wait_for_steps(runner: Runner, count: int) -> None:
    """Until so many more steps are on record than now."""
    last = steps_of(runner)[-1]
    wait_until(lambda: steps_of(runner)[-1] > last + count)


def steps_of(runner: Runner) -> list[int]:
    lines = runner.newest().metrics.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["step"] for row in rows if row["kind"] == "train"]
