"""What `make submit` has submitted, on a real SLURM: finished, preempted, out of time, cancelled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lib.runs.directory import RunDir
from tests.e2e.runner import ROOT, TINY, Runner, assert_same_bits
from tests.e2e.slurm_cluster import Cluster, missing, slurm, wait_until

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
STEPS = 40
SETTINGS = TINY | {
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_MAX_STEPS": str(STEPS),
    "CONFIG_LOG_INTERVAL_STEPS": "1",
    "CONFIG_SLURM_PARTITION": "low",
    "CONFIG_SLURM_TIME": "10:00",
}
# The first attempt waits in an early step until it was told to stop, and a while longer: more may come.
WAIT = """
import os
if "SLURM_PROCID" in os.environ and not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
    import pathlib, signal, time
    import lib.data.loader
    calls = []
    original = lib.data.loader.TrainLoader.micro_batches
    def micro_batches(*arguments, **options):
        calls.append(1)
        if len(calls) == 8:
            waiting = signal.getsignal(signal.SIGINT)
            pathlib.Path({waits!r}).touch()
            while signal.getsignal(signal.SIGINT) is waiting:
                time.sleep(0.05)
            time.sleep(2)
        return original(*arguments, **options)
    lib.data.loader.TrainLoader.micro_batches = micro_batches
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm() as running:
        yield running


@dataclass
class Submitted:
    """A job of `make submit`, and what it leaves."""

    cluster: Cluster
    runner: Runner
    job: str = field(default="", init=False)

    def submit(self, *, waits: bool, **settings: str) -> None:
        """waits: in an early step, in the first attempt; returns when it does so."""
        self.runner.folder.mkdir()
        self.runner.configure("lenet5", SETTINGS | settings)
        environment = {**self.cluster.environment, "OMP_NUM_THREADS": "1"}
        mark = self.runner.folder / "waits"
        if waits:
            (self.runner.folder / "sitecustomize.py").write_text(WAIT.format(waits=str(mark)))
            environment["PYTHONPATH"] = os.pathsep.join([str(self.runner.folder), str(ROOT)])
        command = ["make", "-s", "submit", f"O={self.runner.folder}", "VENV=", f"PYTHON={sys.executable}"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.job = done.stdout.split()[-1]
        (self.runner.folder / ".config").write_text("")  # what comes next is not what was submitted
        if waits:
            wait_until(mark.exists, self.told)

    def end(self, *, state: str, restarts: int) -> RunDir:
        """Waits for the end of the job, which must be that one."""
        fields = self.cluster.wait_for_end(self.job)
        assert (fields["JobState"], int(fields["Restarts"])) == (state, restarts), self.told()
        (run,) = self.runner.runs.glob("*/*")
        return RunDir.open(run)

    def told(self) -> str:
        logs = self.runner.folder.glob("slurm-*.log")
        return "\n".join([str(self.cluster.fields(self.job)), *(log.read_text() for log in logs)])

    def assert_no_step_was_lost(self) -> None:
        stopped = re.findall("stopped by SIGTERM after step ([0-9]+);", self.told())
        assert stopped == re.findall("Starting after step ([0-9]+)", self.told()) != [], self.told()

    def assert_like(self, undisturbed: Submitted, run: RunDir) -> None:
        """Done, with each step once, and the weights of a run that nobody interrupted."""
        assert (run.status().state, run.status().step) == ("done", STEPS), self.told()
        rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, STEPS + 1))
        assert_same_bits(self.runner.weights(), undisturbed.runner.weights())


@pytest.fixture
def submitted(cluster: Cluster, tmp_path: Path) -> Submitted:
    return Submitted(cluster, Runner(tmp_path / "it's 50%j"))


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Submitted:
    job = Submitted(cluster, Runner(tmp_path_factory.mktemp("undisturbed") / "out"))
    job.submit(waits=False)
    job.assert_like(job, job.end(state="COMPLETED", restarts=0))
    return job


@pytest.mark.parametrize("partition", ["low", "sudden"])
def test_a_preempted_job_saves_and_goes_on(
    partition: str, submitted: Submitted, undisturbed: Submitted
) -> None:
    submitted.submit(waits=True, CONFIG_SLURM_PARTITION=partition)
    submitted.cluster.take_the_machine()
    run = submitted.end(state="COMPLETED", restarts=1)
    submitted.assert_no_step_was_lost()
    submitted.assert_like(undisturbed, run)


def test_a_job_whose_time_is_nearly_up_saves_and_goes_on(
    submitted: Submitted, undisturbed: Submitted
) -> None:
    submitted.submit(waits=True, CONFIG_SLURM_TIME="2:00", CONFIG_SLURM_GRACE_SECONDS="50")
    run = submitted.end(state="COMPLETED", restarts=1)
    submitted.assert_no_step_was_lost()
    submitted.assert_like(undisturbed, run)


def test_several_processes_save_and_go_on(submitted: Submitted) -> None:
    submitted.submit(waits=True, CONFIG_NUM_DEVICES="2", CONFIG_DIST_MAX_RESTARTS="0")
    submitted.cluster.take_the_machine()
    run = submitted.end(state="COMPLETED", restarts=1)
    submitted.assert_no_step_was_lost()
    assert (run.status().state, run.status().step) == ("done", STEPS)


def test_a_cancelled_job_saves_and_stays_away(submitted: Submitted) -> None:
    submitted.submit(waits=True)
    submitted.cluster.call("scancel", submitted.job)
    run = submitted.end(state="CANCELLED", restarts=0)
    assert run.status().state == "preempted" and 0 < run.status().step < STEPS
