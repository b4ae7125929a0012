"""Machines that come and go, each a launch of its own on this one."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from lib.runs import checkpoint
from tests.e2e.listeners import held, hold, open_addresses
from tests.e2e.machines import (
    PATIENCE_SECONDS,
    Machine,
    free_port,
    has_namespaces,
    joined_machines,
    listening,
    steps_of,
    wait_for_steps,
    wait_until,
)
from tests.e2e.runner import ROOT, TINY, Runner
from tests.e2e.test_launcher import processes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for ports in /proc"),
]
STEPS, EFFECTIVE = 100_000, 48
SLOW = """
import os, time
if "LOCAL_RANK" in os.environ:
    import train.loop
    original = train.loop.optimizer_step
    def optimizer_step(job, progress, **options):
        time.sleep(0.05)
        return original(job, progress, **options)
    train.loop.optimizer_step = optimizer_step
"""


@pytest.mark.long
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
        wait_until(lambda: said(f"{EFFECTIVE // 3} on each of 3 devices, as requested"))
        wait_for_steps(runner, 30)
        assert open_addresses(processes_of(runner)) == set(), "the endpoint is on the loopback device"
        host, stays, comes = machines
        os.killpg(comes.process.pid, signal.SIGKILL)
        wait_until(lambda: said(f"{EFFECTIVE // 2} on each of 2 devices, as requested") >= 2)
        wait_for_steps(runner, 30)
        host.process.send_signal(signal.SIGTERM)
        assert host.process.wait(PATIENCE_SECONDS) == 75, host.log.read_text()
        assert stays.process.wait(PATIENCE_SECONDS) == 75, stays.log.read_text()
    finally:
        for machine in machines:
            machine.end()
    status = runner.newest().status()
    assert status.state == "preempted" and status.step > 20
    assert steps_of(runner) == list(range(1, status.step + 1)), "each once, none lost"
    assert len(list(runner.runs.glob("*/*"))) == 1
    assert checkpoint.steps(runner.newest().checkpoints)[-1] == status.step, "it goes on from there"
    output = stays.log.read_text()
    assert output.splitlines()[-1].startswith("error: the other nodes are unreachable, or too few: "), output
    assert said("a node joins or leaves: stopping after step") >= 1, "the third joined the first two"
    assert said("stopped by SIGTERM") == said("make resume RUN=") == 1, "only the one that was told to go"
    assert "frame #" not in output and "Traceback" not in output, output


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="needs the rights to make network namespaces")
def test_machines_meet_though_their_own_names_lead_to_themselves(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    settings = {
        "CONFIG_DEVICE_CPU": "y",
        "CONFIG_DIST_NNODES": "2",
        "CONFIG_DIST_ENDPOINT": "10.61.0.1:29500",
        "CONFIG_TARGET_EFFECTIVE_BATCH": str(EFFECTIVE),
        "CONFIG_MAX_STEPS": "3",
    }
    runner.configure("lenet5", TINY | settings)
    with joined_machines(tmp_path, ("one", "two")) as network, ExitStack() as ended:
        one, two = network.within
        by_number = [route_within(machine, "10.61.0.1:29500") for machine in (one, two)]
        by_name = [route_within(machine, "one:29500") for machine in (one, two)]
        variables = hold(tmp_path)
        machines = [
            Machine(runner, f"of-{n}", within=machine, variables=variables)
            for n, machine in enumerate((one, two))
        ]
        for machine in machines:
            ended.callback(machine.end)
        wait_until(lambda: len(held(tmp_path)) == 2 or any(machine.process.poll() for machine in machines))
        opened = {place.rpartition(":")[0] for place in open_addresses(processes_of(runner))}
        (tmp_path / "go").touch()
        for machine in machines:
            assert machine.process.wait(PATIENCE_SECONDS) == 0, machine.log.read_text()
    assert opened == {"10.61.0.1", "10.61.0.2"}, "and on no other interface"
    assert by_number == [("10.61.0.1", "cable", True), ("10.61.0.2", "cable", False)]
    assert by_name == [("10.61.0.1", "cable", None), ("10.61.0.2", "cable", False)]
    status = runner.newest().status()
    assert (status.state, status.step) == ("done", 3)


def route_within(machine: Sequence[str], endpoint: str) -> object:
    """(address, interface, whether it is the host) of the route from there."""
    program = (
        f"from lib.distributed.rendezvous import *; r = route_to('{endpoint}');"
        "print((r.address, r.interface, r.is_host))"
    )
    command = [*machine, "env", f"PYTHONPATH={ROOT}", sys.executable, "-c", program]
    return ast.literal_eval(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
