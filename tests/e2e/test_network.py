"""Nodes of unequal sizes, each on a network of its own: stalls, resets, a late one, the first one lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lib.devices.probe import probe
from lib.runs import checkpoint
from tests.e2e.machines import (
    PATIENCE_SECONDS,
    Machine,
    Network,
    has_namespaces,
    joined_machines,
    steps_of,
    wait_until,
)
from tests.e2e.runner import TINY, Runner
from tests.e2e.test_launcher import processes_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not has_namespaces(), reason="needs the rights to make network namespaces"),
]
STEPS = 30
SETTINGS = TINY | {
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_TARGET_EFFECTIVE_BATCH": "50",
    "CONFIG_MAX_STEPS": str(STEPS),
    "CONFIG_CHECKPOINT_INTERVAL_STEPS": "3",
    "CONFIG_LOG_INTERVAL_STEPS": "1",
    "CONFIG_EVAL_INTERVAL_STEPS": "100000",
    "CONFIG_CHANNELS_LAST": "n",
}
# No rank makes a step beyond the number in the file "limit", unless it is to stop after it.
LIMITED = """
import os, pathlib, signal, time
if "LOCAL_RANK" in os.environ:
    import train.loop
    original = train.loop.optimizer_step
    limit = pathlib.Path({limit!r})
    def optimizer_step(job, progress, **options):
        handler = signal.getsignal(signal.SIGINT)  # replaced by the first signal
        while progress.step >= int(limit.read_text()) and signal.getsignal(signal.SIGINT) is handler:
            time.sleep(0.05)
        return original(job, progress, **options)
    train.loop.optimizer_step = optimizer_step
"""


class Nodes:
    """A run of several nodes, each with its number of processes."""

    def __init__(self, folder: Path, network: Network, *, nodes: str) -> None:
        """nodes: CONFIG_DIST_NNODES."""
        folder.mkdir()
        self.runner, self.network = Runner(folder), network
        several = {"CONFIG_DIST_NNODES": nodes, "CONFIG_DIST_ENDPOINT": "10.61.0.1:29500"}
        self.runner.configure("lenet5", SETTINGS | several)
        (folder / "sitecustomize.py").write_text(LIMITED.format(limit=str(folder / "limit")))
        self.machines = list[Machine]()

    def start(self, node: int, *, processes: int, endpoint: int = 1) -> Machine:
        """Start node 1, 2 or 3, with the endpoint at that one."""
        given = {"CONFIG_NUM_DEVICES": str(processes), "CONFIG_DIST_ENDPOINT": f"10.61.0.{endpoint}:29500"}
        variables = {**given, "KCONFIG_MAKE_VARIABLES": " ".join(given)}
        name = f"node-{node}-{len(self.machines)}"
        within = self.network.within[node - 1]
        self.machines.append(Machine(self.runner, name, within=within, variables=variables))
        return self.machines[-1]

    def allow(self, steps: int) -> None:
        """Let the ranks make so many steps in all."""
        (self.runner.folder / "limit.new").write_text(str(steps))
        (self.runner.folder / "limit.new").rename(self.runner.folder / "limit")

    def go_to(self, steps: int) -> None:
        """Return once so many steps, a multiple of the checkpoint interval, are made and saved."""
        self.allow(steps)
        wait_until(lambda: list(self.runner.runs.glob(f"*/*/ckpt/step-{steps:08}")), self.told)

    def told(self) -> str:
        return "\n".join(f"{machine.log}:\n{machine.log.read_text()}" for machine in self.machines)

    def said(self, text: str) -> int:
        return sum(machine.said(text) for machine in self.machines)

    def end(self) -> None:
        for machine in self.machines:
            machine.end()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    runner = Runner(tmp_path_factory.mktemp("alone"))
    runner.configure("lenet5", SETTINGS)
    runner.run("train")
    return losses(runner)


def losses(runner: Runner) -> list[float]:
    rows = map(json.loads, runner.newest().metrics.read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


@contextmanager
def three_machines(folder: Path, *, nodes: str) -> Iterator[Nodes]:
    with joined_machines(folder, ("one", "two", "three")) as network, ExitStack() as ended:
        started = Nodes(folder / "run", network, nodes=nodes)
        ended.callback(started.end)
        yield started


def test_unequal_nodes_a_stall_and_a_reset_give_the_losses_of_one_process(
    tmp_path: Path, alone: list[float]
) -> None:
    with three_machines(tmp_path, nodes="2") as nodes:
        machines = [nodes.start(1, processes=1), nodes.start(2, processes=2)]
        nodes.go_to(3)
        assert nodes.said("of 3 devices 2 have 17 and 1 has 16"), nodes.told()
        plan = json.loads((nodes.runner.newest().path / "plan.json").read_text())
        assert plan["reasons"]["world"].startswith("3 processes on all nodes"), plan["reasons"]
        hardware = json.loads((nodes.runner.newest().path / "hardware.json").read_text())
        assert hardware["cpu_count"] == 2 * probe("cpu").cpu_count
        nodes.network.relay("hold all")
        nodes.allow(6)
        nodes.network.relay("held")
        nodes.network.relay("go")
        nodes.go_to(6)
        assert nodes.said("Starting after step") == nodes.said("joining them again") == 0, nodes.told()
        nodes.network.relay("reset")
        nodes.allow(STEPS)
        for machine in machines:
            assert machine.process.wait(PATIENCE_SECONDS) == 0, nodes.told()
    assert nodes.said("Starting after step 6") == nodes.said("joining them again (1 of 3)") == 1, nodes.told()
    assert "error" not in nodes.told()
    assert steps_of(nodes.runner) == list(range(1, STEPS + 1)), "each once, none lost"
    assert losses(nodes.runner) == pytest.approx(alone, rel=1e-5)


def network_of(pid: int) -> str:
    """The network namespace of a process; "" once it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""


def test_a_node_comes_late_and_the_first_one_is_lost(tmp_path: Path, alone: list[float]) -> None:
    with three_machines(tmp_path, nodes="2:3") as nodes:
        first, *others = [nodes.start(1, processes=1), nodes.start(2, processes=2)]
        nodes.go_to(3)
        others.append(nodes.start(3, processes=1))
        wait_until(lambda: nodes.said("of 4 devices 2 have 13 and 2 have 12"), nodes.told)
        wait_until(lambda: nodes.said("Starting after step"), nodes.told)
        nodes.go_to(9)
        assert nodes.runner.newest().status().host == "one"
        home = network_of(first.process.pid)
        first.end()
        wait_until(lambda: home not in map(network_of, processes_of(nodes.runner)), nodes.told)
        nodes.allow(STEPS)
        for machine in others:
            assert machine.process.wait(PATIENCE_SECONDS) == 1, nodes.told()
            output = machine.log.read_text()
            assert output.count("joining them again") == 1 and "Traceback" not in output, output
            assert output.splitlines()[-1].startswith("error: the other nodes are unreachable, "), output
        wait_until(lambda: not processes_of(nodes.runner))
        saved = checkpoint.steps(nodes.runner.newest().checkpoints)[-1]
        again = [nodes.start(node, processes=2, endpoint=2) for node in (2, 3)]
        for machine in again:
            assert machine.process.wait(PATIENCE_SECONDS) == 0, nodes.told()
        assert nodes.said(f"Starting after step {saved}\n") and 9 <= saved < STEPS, nodes.told()
    assert len(list(nodes.runner.runs.glob("*/*"))) == 1
    assert steps_of(nodes.runner) == list(range(1, STEPS + 1)), "each once, none lost"
    assert losses(nodes.runner) == pytest.approx(alone, rel=1e-5)
