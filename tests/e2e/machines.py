"""Launches that stand for machines, on networks of their own that a relay may join."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.e2e.runner import ROOT, Runner

PATIENCE_SECONDS = 240
ENDPOINT_PORT = 29500
PORTS = range(40000, 40256)  # those that machines on a network of their own choose from


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def wait_until(true: Callable[[], object], told: Callable[[], str] = str) -> None:
    """Raises AssertionError with what `told` gives where it does not become true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < deadline, told()
        time.sleep(0.1)


class Machine:
    """One launch; it ends with all its processes."""

    def __init__(
        self,
        runner: Runner,
        name: str,
        *,
        within: Sequence[str] = (),
        command: str = "train",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.log = runner.folder / f"{name}.log"
        path = {"PYTHONPATH": os.pathsep.join([str(runner.folder), str(ROOT)])}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "train", "--runs", str(runner.runs), command],
                cwd=ROOT,
                env=runner.environment() | path | (variables or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def said(self, text: str) -> int:
        return self.log.read_text().count(text)


def listening(port: int) -> bool:
    """Whether somebody accepts connections there; asking by one would be in the way."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    found = (line.split()[1:4] for line in lines)  # its own address, the other's, a state
    return any(state == "0A" and int(own.rpartition(":")[2], 16) == port for own, _, state in found)


def wait_for_steps(runner: Runner, count: int) -> None:
    """Until so many more steps are on record than now."""
    last = steps_of(runner)[-1]
    wait_until(lambda: steps_of(runner)[-1] > last + count)


def steps_of(runner: Runner) -> list[int]:
    lines = runner.newest().metrics.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["step"] for row in rows if row["kind"] == "train"]


def has_namespaces() -> bool:
    """Whether this user may give a process a network, a name and a file system view of its own."""
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        return False
    return subprocess.run(["unshare", "-nmu", "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def machine_of_its_own(name: str, hosts: Path, *, address: str = "127.0.1.1") -> Iterator[int]:
    """A process whose network, name and /etc/hosts are not those of this machine; as Debian installs it."""
    hosts.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
    (servers := hosts.with_suffix(".servers")).write_text("nameserver 127.0.0.1\n")  # nobody, and it says so
    mounted = f"mount --bind {hosts} /etc/hosts && mount --bind {servers} /etc/resolv.conf"
    prepare = f"hostname {name} && {mounted} && ip link set lo up && echo ready && cat"
    command = ["unshare", "-nmu", "sh", "-c", prepare]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "ready\n"
        yield holder.pid


class Network:
    """Machines of their own, machine N at 10.61.0.N, and a relay of all their TCP connections."""

    def __init__(self, within: Sequence[Sequence[str]], relay: subprocess.Popen[str]) -> None:
        """within: commands that enter each machine."""
        self.within, self._relay = within, relay

    def relay(self, command: str) -> None:
        """Have the relay do this (see relay.py), and return once it has."""
        assert self._relay.stdin and self._relay.stdout
        print(command, file=self._relay.stdin, flush=True)
        assert self._relay.stdout.readline() == "done\n"


@contextmanager
def joined_machines(folder: Path, names: Sequence[str]) -> Iterator[Network]:
    """Machines with these names, each with a cable to a hub; all but the first know the first's name."""
    with ExitStack() as ended:
        holders = [ended.enter_context(machine_of_its_own(name, folder / name)) for name in (*names, "hub")]
        *within, hub = [["nsenter", "-t", str(holder), "-n", "-m", "-u"] for holder in holders]
        for name in names[1:]:
            with (folder / name).open("a") as hosts:
                hosts.write(f"10.61.0.1 {names[0]}\n")
        # TCP from a cable is delivered to the hub itself, whatever its address; the rest is routed.
        hub_setup = [
            "sysctl -q net.ipv4.ip_forward=1 net.ipv4.conf.all.proxy_arp=1",
            "ip addr add 10.61.0.254/32 dev lo",
            "ip route add local 10.61.0.0/24 dev lo table 61",
        ]
        for number, (enter, holder) in enumerate(zip(within, holders[:-1], strict=True), start=1):
            hub_setup += [
                f"ip link add name wire{number} type veth peer name cable netns {holder}",
                f"sysctl -q net.ipv4.neigh.wire{number}.proxy_delay=0",
                f"ip link set wire{number} up",
                f"ip route add 10.61.0.{number}/32 dev wire{number} src 10.61.0.254",
                f"ip rule add iif wire{number} ipproto tcp lookup 61",
            ]
            _within(hub, hub_setup)
            hub_setup = []
            ports = f"sysctl -q net.ipv4.ip_local_port_range={PORTS[0]}\\ {PORTS[-1]}"
            address = f"ip addr add 10.61.0.{number}/24 dev cable"
            up = "ip link set cable up"
            _within(enter, [ports, address, up, "ip route add default dev cable"])
        listened = [str(port) for port in (ENDPOINT_PORT, *PORTS)]
        relay = ended.enter_context(
            subprocess.Popen(
                [*hub, sys.executable, str(Path(__file__).with_name("relay.py")), *listened],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert relay.stdout and relay.stdout.readline() == "ready\n"
        yield Network(within, relay)


def _within(machine: Sequence[str], commands: Sequence[str]) -> None:
    subprocess.run([*machine, "sh", "-ec", "\n".join(commands)], check=True)
