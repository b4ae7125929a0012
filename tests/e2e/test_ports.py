"""What runs on one machine cannot be reached from another: it listens on the loopback device alone."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.forked import Forked
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


def while_held(
    runner: Runner,
    process: Forked | subprocess.Popen[bytes],
    said: Callable[[], str],
    look: Callable[[], object],
) -> None:
    """Call `look` when both ranks of a run have met, and have it train to its end."""
    wait_until(lambda: len(held(runner.folder)) == 2 or process.poll() is not None)
    assert process.poll() is None, said()
    look()
    (runner.folder / "go").touch()
    assert process.wait(PATIENCE_SECONDS) == 0, said()


def assert_closed(runner: Runner) -> None:
    assert open_addresses(processes_of(runner)) == set()


# A list of the user's interfaces is for several machines.
INTERFACES = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}


def test_nothing_listens_beyond_the_loopback_device(tmp_path: Path) -> None:
    runner = Runner(tmp_path, forks=True)
    runner.configure("lenet5", TWO)
    process = runner.start("train", **hold(tmp_path), **INTERFACES)

    def look() -> None:
        assert len(processes_of(runner)) == 3, "the supervisor and two workers"
        assert_closed(runner)

    try:
        while_held(runner, process, lambda: process.communicate()[0], look)
    finally:
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("command", ["train", "preflight"])
def test_nor_where_all_are_started_as_a_user_does(command: str, tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", TWO)
    machine = Machine(runner, "alone", command=command, variables=hold(tmp_path) | INTERFACES)

    def look() -> None:
        assert len(processes_of(runner)) >= 3
        assert_closed(runner)

    try:
        while_held(runner, machine.process, machine.log.read_text, look)
    finally:
        machine.end()


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
        try:
            while_held(runner, machine.process, machine.log.read_text, lambda: assert_closed(runner))
        finally:
            machine.end()
