"""What runs on one machine cannot be reached from another: it listens on the loopback device alone."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.listeners import held, hold, open_addresses
from tests.e2e.machines import (
    PATIENCE_SECONDS,
    Machine,
    has_namespaces,
    machine_of_its_own,
    wait_until,
)
from tests.e2e.runner import BRIEF, Runner
from tests.e2e.test_launcher import processes_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks for sockets in /proc"),
]
TWO = BRIEF | {"CONFIG_DEVICE_CPU": "y", "CONFIG_NUM_DEVICES": "2", "CONFIG_MAX_STEPS": "2"}


def test_a_socket_that_is_open_is_seen() -> None:
    with socket.socket() as everywhere, socket.socket(socket.AF_INET6) as here:
        everywhere.bind(("", 0))
        here.bind(("::1", 0))
        for opened in (everywhere, here):
            opened.listen()
        port = everywhere.getsockname()[1]
        assert open_addresses([os.getpid()]) == {f"0.0.0.0:{port}"}


def while_held(runner: Runner, machine: Machine, look: Callable[[], object]) -> None:
    """Call `look` when both ranks of a run have met, and have it go on to its end."""
    try:
        wait_until(lambda: len(held(runner.folder)) == 2 or machine.process.poll() is not None)
        assert machine.process.poll() is None, machine.log.read_text()
        look()
        (runner.folder / "go").touch()
        assert machine.process.wait(PATIENCE_SECONDS) == 0, machine.log.read_text()
    finally:
        machine.end()


@pytest.mark.parametrize("command", ["train", pytest.param("preflight", marks=pytest.mark.long)])
def test_nothing_listens_beyond_the_loopback_device(command: str, tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", TWO)
    # A list of the user's interfaces is for several machines.
    variables = hold(tmp_path) | {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}

    def look() -> None:
        assert len(processes_of(runner)) >= 3
        assert open_addresses(processes_of(runner)) == set()

    while_held(runner, Machine(runner, "alone", command=command, variables=variables), look)


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="needs the rights to make network namespaces")
def test_nor_where_the_host_name_leads_elsewhere(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", TWO)
    with machine_of_its_own("one", tmp_path / "hosts", address="10.61.0.1") as holder:
        within = ["nsenter", "-t", str(holder), "-n", "-m", "-u"]
        for change in (
            "link add name cable type veth peer name end",
            "addr add 10.61.0.1/24 dev cable",
            "link set end up",
            "link set cable up",
        ):
            subprocess.run([*within, "ip", *change.split()], check=True)
        found = subprocess.run([*within, "getent", "hosts", "one"], stdout=subprocess.PIPE, check=True)
        assert found.stdout.startswith(b"10.61.0.1 ")
        machine = Machine(runner, "one", within=within, variables=hold(tmp_path))
        while_held(runner, machine, lambda: _assert_closed(runner))


def _assert_closed(runner: Runner) -> None:
    assert open_addresses(processes_of(runner)) == set()
