"""Two processes look like one: signals, errors, crashes and kills as the user meets them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.runs import checkpoint, metrics
from tests.e2e.forked import Forked, name_of
from tests.e2e.runner import BRIEF, ROOT, Runner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc"),
]
LONG = {"CONFIG_MAX_STEPS": "1000000", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "5"}
LEFT_SECONDS = 60
# Without forks processes are started as a user's are, as in test_a_signal_saves_and_ends_with_its_own_status.
BOTH_WAYS = pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.long)])
# Python runs it in every process when it starts.
SABOTAGE = """
import os, sys
if os.environ.get("RANK") == {rank!r}:
    import lib.data.loader
    calls = []
    original = lib.data.loader.TrainLoader.micro_batches
    def micro_batches(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            {deed}
        return original(*arguments, **options)
    lib.data.loader.TrainLoader.micro_batches = micro_batches
"""


# Workers that have not told their numbers yet, however long it takes the test to send a signal. The folder of
# the launch is removed when it ends; a parent may be gone before its worker looks for the first time.
NOT_READY_YET = """
import os, time
if "RANK" in os.environ:
    folder, begun = os.path.dirname(os.environ["ANNEAL_STORE"]), time.monotonic()
    while os.path.isdir(folder) and time.monotonic() < begun + 60:
        time.sleep(0.05)
"""

# The thread that got the signal has removed the folder of the workers, and takes its time to exit.
ENDING = """
import os, shutil, subprocess, sys, threading, time
if "RANK" not in os.environ and "lib.distributed.supervisor" in sys.orig_argv:
    notes = sys.orig_argv[sys.orig_argv.index("lib.distributed.supervisor") + 1]
    remove, begin = shutil.rmtree, subprocess.Popen.__init__

    def slow_rmtree(*arguments, **keywords):
        remove(*arguments, **keywords)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(2)

    def late_init(*arguments, **keywords):
        while os.path.exists(notes):
            time.sleep(0.01)
        begin(*arguments, **keywords)

    shutil.rmtree, subprocess.Popen.__init__ = slow_rmtree, late_init
"""


@pytest.fixture
def forking(tmp_path: Path) -> Runner:
    """For what ranks and their supervisor do once they are there."""
    return of_two(Runner(tmp_path, forks=True))


def of_two(runner: Runner) -> Runner:
    two = {"CONFIG_DEVICE_CPU": "y", "CONFIG_NUM_DEVICES": "2", "CONFIG_DIST_MAX_RESTARTS": "0"}
    runner.configure("lenet5", BRIEF | LONG | two)
    return runner


def processes_of(runner: Runner) -> dict[int, str]:
    """Command lines of the run's processes by number: they are told by their environment, or name."""
    wanted = f"KCONFIG_CONFIG={runner.folder / '.config'}".encode()
    name = name_of(runner.environment()) + "\n"
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            if wanted in environment or (path / "comm").read_text() == name:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended
    return {pid: command for pid, command in found.items() if command}  # a zombie has no command


def wait_until(true: Callable[[], object], process: Forked, *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def training(runner: Runner) -> Forked:
    """A run that has begun to train."""
    process = runner.start("train")
    wait_until(lambda: list(runner.runs.glob("*/*/ckpt/step-*")), process)
    return process


def sabotaged(runner: Runner, *, rank: int, deed: str) -> str:
    """What is said by a run of which process `rank` does that in its third step."""
    (runner.folder / "sitecustomize.py").write_text(SABOTAGE.format(rank=str(rank), deed=deed))
    process = runner.start("train", PYTHONPATH=os.pathsep.join([str(runner.folder), str(ROOT)]))
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
    return output


def assert_nothing_is_left(runner: Runner) -> None:
    deadline = time.monotonic() + LEFT_SECONDS
    while left := processes_of(runner):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(("number", "forks"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_saves_and_ends_with_its_own_status(
    tmp_path: Path, number: signal.Signals, forks: bool
) -> None:
    runner = of_two(Runner(tmp_path, forks=forks))
    process = training(runner)
    assert len(processes_of(runner)) == 3, "the supervisor and two workers"
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert output.count("error:") == 1 and output.splitlines()[-1].startswith("error: stopped by SIG")
    assert "Traceback" not in output and "Warning" not in output and "torch" not in output, output
    run = runner.newest()
    assert run.status().state == "preempted"
    made = [row["step"] for row in metrics.read(run.metrics) if row["kind"] == "train"]
    assert made[-1] == run.status().step == checkpoint.steps(run.checkpoints)[-1], "no step is lost"
    assert_nothing_is_left(runner)


def test_a_second_interrupt_ends_at_once(forking: Runner) -> None:
    process = training(forking)
    worker = int((notes_of(process) / "0.pid").read_text())
    os.kill(worker, signal.SIGSTOP)  # as if saving took its time
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.5)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and output.splitlines()[-1] == "interrupted"
    assert "Traceback" not in output
    assert_nothing_is_left(forking)


def notes_of(process: Forked) -> Path:
    """The directory of a launch that is going on."""
    found = launch_of(process)
    assert found, "there is no launch"
    return found


def launch_of(process: Forked) -> Path | None:
    for launch in Path(tempfile.gettempdir()).glob("anneal-*/launch.json"):
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # another has ended, or begins
            if json.loads(launch.read_text())["supervisor"] == process.pid:
                return launch.parent
    return None


@BOTH_WAYS
@pytest.mark.parametrize("meanwhile", [NOT_READY_YET, ENDING])
def test_a_signal_before_there_are_workers_ends_at_once(tmp_path: Path, meanwhile: str, forks: bool) -> None:
    runner = of_two(Runner(tmp_path, forks=forks))
    (runner.folder / "sitecustomize.py").write_text(meanwhile)
    process = runner.start("train", PYTHONPATH=os.pathsep.join([str(runner.folder), str(ROOT)]))
    wait_until(lambda: launch_of(process), process)
    notes = notes_of(process)
    wait_until((notes / "local" / "attempt_0").exists, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and output.splitlines()[-1] == "interrupted", output
    assert "Traceback" not in output and not notes.exists()
    assert_nothing_is_left(runner)


def test_an_error_of_rank_0_is_one_line_and_keeps_its_status(forking: Runner) -> None:
    forking.runs.write_text("in the way")
    output = forking.run("train", status=1)
    assert output.splitlines()[-1].startswith("error: cannot create a run directory")
    assert output.count("error:") == 1 and "Traceback" not in output
    assert_nothing_is_left(forking)


def test_another_status_of_rank_0_is_kept(forking: Runner) -> None:
    deed = "from lib.errors import ConfigError; raise ConfigError('nothing can be done')"
    (forking.folder / "sitecustomize.py").write_text(SABOTAGE.format(rank="0", deed=deed))
    path = os.pathsep.join([str(forking.folder), str(ROOT)])
    output = forking.run("train", status=2, PYTHONPATH=path)
    assert output.splitlines()[-1] == "error: nothing can be done" and "Traceback" not in output
    assert_nothing_is_left(forking)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_crash_that_made_the_others_fail_is_shown(forking: Runner, rank: int) -> None:
    deed = "os.write(2, b'it came to this\\n'); raise ArithmeticError('that went wrong')"
    output = sabotaged(forking, rank=rank, deed=deed)
    assert output.count("Traceback") == 1 and "ArithmeticError: that went wrong" in output, output
    assert output.splitlines()[-1] == f"error: process {rank} of 2 ended with status 1"
    assert forking.newest().status().state == "failed"
    kept = forking.newest().path / "ranks" / "1.txt"
    assert "it came to this" in (kept.read_text() if rank == 1 else output)
    assert_nothing_is_left(forking)


def test_an_error_of_another_rank_is_shown_in_one_line(forking: Runner) -> None:
    deed = "from lib.errors import ToolkitError; raise ToolkitError('no memory', why='full')"
    output = sabotaged(forking, rank=1, deed=deed)
    assert "Traceback" not in output, output
    assert output.splitlines()[-2:] == ["error: no memory: full", "error: process 1 of 2 ended with status 1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_killed_is_named(forking: Runner, rank: int) -> None:
    output = sabotaged(forking, rank=rank, deed="os.kill(os.getpid(), 9)")
    told = f"process {rank} of 2 was ended by signal 9 (Killed)"
    assert output.splitlines()[-1] == f"error: {told}" and "Traceback" not in output, output
    status = forking.newest().status()
    assert status.state == "failed" and (rank == 1 or status.reason == told)
    assert_nothing_is_left(forking)


def test_nothing_outlives_a_killed_supervisor(forking: Runner) -> None:
    process = training(forking)
    assert len(processes_of(forking)) == 3
    notes = notes_of(process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert_nothing_is_left(forking)
    assert "Traceback" not in process.communicate()[0]
    assert not notes.exists()
