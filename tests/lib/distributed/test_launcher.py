"""What the supervisor and its workers are told, and what a worker leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lib.distributed import launcher, supervisor
from lib.runs.directory import RunDir

ROOT = Path(__file__).resolve().parents[3]


class Replaced(Exception):
    """In place of this process being replaced."""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """What this process would have been replaced by."""
    called: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        called.append((path, arguments, environment))
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    return called


def test_launching_becomes_a_supervisor_and_shares_out_the_processors(
    replaced: list[tuple[str, list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, used in ((None, "4"), ("3", "3")):  # what the user set is kept
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        with pytest.raises(Replaced):
            arguments = ["--runs", "elsewhere", "train"]
            launcher.launch({"a": 1}, world=2, restarts=3, cpu_count=9, arguments=arguments)
        path, arguments, environment = replaced.pop()
        assert path == arguments[0] == sys.executable
        assert arguments[1:3] == ["-m", "lib.distributed.supervisor"]
        assert arguments[4:] == ["2", "--runs", "elsewhere", "train"]
        assert environment["OMP_NUM_THREADS"] == used
        shutil.rmtree(arguments[3])


def worker(notes: Path | None, code: str) -> subprocess.CompletedProcess[str]:
    """A process that runs `code`; of a launch where there are notes."""
    variables = {**os.environ, "LOCAL_RANK": "0"}
    if notes is not None:
        variables["ANNEAL_LAUNCH"] = str(notes)
    return subprocess.run(
        [sys.executable, "-c", f"from lib.distributed import launcher\n{code}"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Those of a launch by this process."""
    (tmp_path / "launch.json").write_text(f'{{"plan": {{"a": 1}}, "supervisor": {os.getpid()}}}')
    return tmp_path


def test_a_worker_ends_with_its_status_and_all_it_said() -> None:
    code = (
        "import atexit; atexit.register(print, 'cleaned up'); print('said', end=''); launcher.end_process(7)"
    )
    process = worker(None, code)
    assert (process.returncode, process.stdout) == (7, "said")


def test_a_process_of_its_own_is_no_worker() -> None:
    assert worker(None, "print(launcher.become_worker())").stdout == "None\n"


def test_a_worker_gets_the_plan_and_leaves_its_status(notes: Path) -> None:
    process = worker(notes, "print(launcher.become_worker(), flush=True); launcher.end_process(75)")
    assert (process.returncode, process.stdout) == (75, "{'a': 1}\n")
    assert int((notes / "0.pid").read_text()) > 0
    assert (notes / "0.status").read_text() == "75" and not (notes / "0.crash").exists()


def test_a_crash_is_left_to_the_supervisor(notes: Path) -> None:
    process = worker(notes, "launcher.become_worker(); 1 / 0")
    assert (process.returncode, process.stderr) == (1, "")
    assert (notes / "0.crash").read_text().splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert not (notes / "0.status").exists()


def test_a_worker_without_its_supervisor_ends(notes: Path) -> None:
    (notes / "launch.json").write_text('{"plan": {}, "supervisor": 0}')
    process = worker(notes, "import time; launcher.become_worker(); time.sleep(20); print('went on')")
    assert (process.returncode, process.stdout, process.stderr) == (1, "", "")


def test_a_worker_that_comes_too_late_ends_without_a_word(tmp_path: Path) -> None:
    process = worker(tmp_path / "gone", "launcher.become_worker(); print('went on')")
    assert (process.returncode, process.stdout, process.stderr) == (1, "", "")


def test_a_supervisor_is_light() -> None:
    process = worker(None, "import sys, lib.distributed.supervisor; print('torch' in sys.modules)")
    assert process.stdout == "False\n"


def test_what_a_worker_keeps_is_there_for_those_who_take_its_place(notes: Path) -> None:
    keep = "from pathlib import Path; from lib.runs.directory import RunDir; launcher.become_worker(); "
    keep += "launcher.keep(RunDir(Path('here')), own=True); launcher.end_process(0)"
    assert worker(notes, keep).returncode == 0
    told = "{'a': 1, 'run': 'here', 'own': True}\n"
    assert worker(notes, "print(launcher.become_worker())").stdout == told
    assert worker(None, keep).returncode == 0


class Failing(supervisor.Supervisor):
    """Workers that end as they are told, one attempt after the other."""

    def __init__(self, notes: Path, *attempts: dict[int, int], leaves: dict[str, str] | None = None) -> None:
        super().__init__(notes, world=2)
        self.attempts, self.leaves, self.started = list(attempts), leaves or {}, 0

    def _attempt(self, arguments: Sequence[str]) -> dict[int, int]:  # noqa: ARG002
        self.started += 1
        assert not list(self._notes.glob("*.crash")), "what was left before is still there"
        for name, text in self.leaves.items():
            (self._notes / name).write_text(text)
        return self.attempts.pop(0)


@pytest.fixture
def restarting(notes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(supervisor, "_handle_signals", lambda *_: None)
    launched = {"plan": {}, "supervisor": 1, "restarts": 2, "torchrun": None, "serve": None}
    (notes / "launch.json").write_text(json.dumps(launched))
    return notes


@pytest.fixture
def joining(restarting: Path) -> Path:
    """One node of several."""
    launch = restarting / "launch.json"
    launch.write_text(json.dumps(json.loads(launch.read_text()) | {"torchrun": []}))
    return restarting


class Disconnected(Failing):
    """It loses the endpoint in every attempt, after its workers have left what they leave."""

    reset = True  # by the connection, rather than by waiting in vain

    def _attempt(self, arguments: Sequence[str]) -> dict[int, int]:
        self._lost, self._disconnected = "reset by peer", self.reset
        return super()._attempt(arguments)


def test_a_node_that_loses_the_endpoint_joins_again(
    joining: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Disconnected(joining, {}, {}, {}, leaves={"0.pid": "1"})
    assert node.run([]) == 1 and node.started == 3
    said = capsys.readouterr().err.splitlines()
    assert said[1] == "lost the other nodes: reset by peer: joining them again (2 of 2)" and len(said) == 3
    assert said[2].startswith("error: the other nodes are unreachable, or too few: reset by peer; ")


@pytest.mark.parametrize(
    ("leaves", "reset"), [({}, True), ({"0.pid": "1", "0.status": "75"}, True), ({"0.pid": "1"}, False)]
)
def test_not_if_it_never_met_them_or_has_saved_or_waited_in_vain(
    joining: Path, leaves: dict[str, str], reset: bool
) -> None:
    node = Disconnected(joining, {}, leaves=leaves)
    node.reset = reset
    assert node.run([]) == int(leaves.get("0.status", 1)) and node.started == 1


def test_workers_are_started_again_when_one_was_killed(
    restarting: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {"0.crash": "the other one is gone", "kept.json": "{}"}
    failing = Failing(restarting, {0: 1, 1: -9}, {0: 1, 1: -9}, {}, leaves=left)
    (restarting / "0.pid").write_text("1")
    assert failing.run([]) == 0
    assert failing.started == 3 and (restarting / "kept.json").exists()
    assert (
        "process 1 of 2 was ended by signal 9 (Killed): starting all again (2 of 2)"
        in capsys.readouterr().err
    )


def test_not_more_often_than_allowed(restarting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Failing(restarting, *[{1: -9}] * 3)
    assert failing.run([]) == 1 and failing.started == 3
    assert "error: process 1 of 2 was ended by signal 9" in capsys.readouterr().err


def test_an_error_is_not_tried_again(restarting: Path) -> None:
    failing = Failing(restarting, {1: 1}, leaves={"1.crash": "that went wrong"})
    assert failing.run([]) == 1 and failing.started == 1


@pytest.mark.parametrize(("own", "state"), [("true", "failed"), ("false", "running")])
def test_only_where_rank_0_is_the_run_is_said_to_have_failed(
    restarting: Path, tmp_path: Path, own: str, state: str
) -> None:
    """Other machines may go on without this one."""
    run = RunDir.create(tmp_path / "runs", model="lenet5", identity="0123abcd", files={"config": ""})
    run.set_status("running", step=5)
    kept = f'{{"run": "{run.path}", "own": {own}}}'
    failing = Failing(restarting, {1: 1}, leaves={"1.crash": "that went wrong", "kept.json": kept})
    assert failing.run([]) == 1
    assert run.status().state == state


def test_nor_what_was_asked_to_stop(restarting: Path) -> None:
    failing = Failing(restarting, {1: -9})
    failing._signal = 15
    assert failing.run([]) == 143 and failing.started == 1


# As in the constructor of torch's store: outside of Python, and no signal brings it back.
STUCK = """
import ctypes, pathlib, sys
from lib.distributed import supervisor

class Stuck(supervisor.Supervisor):
    def _torchrun(self, arguments):
        mutex, c = ctypes.create_string_buffer(128), ctypes.CDLL(None)
        c.pthread_mutex_init(mutex, None)
        c.pthread_mutex_lock(mutex)
        print("nearly stuck", flush=True)
        c.pthread_mutex_lock(mutex)

Stuck(pathlib.Path(sys.argv[1]), world=2).run([])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_supervisor_that_waits_for_other_machines_can_be_interrupted(
    joining: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", STUCK, str(joining)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "nearly stuck\n"
            time.sleep(0.1)  # until it is
            process.send_signal(number)
            _, told = process.communicate(timeout=5)
        finally:
            process.kill()
    assert (process.returncode, told) == (128 + number, "interrupted\n")
    assert not joining.exists()


class Left(Exception):
    """In place of this process ending."""


def test_a_machine_that_is_told_to_go_keeps_what_its_ranks_wrote_once(
    joining: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(status: int) -> None:
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    run, log = tmp_path_factory.mktemp("run"), joining / "id" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("said\n")
    (joining / "kept.json").write_text(json.dumps({"run": str(run), "own": True}))
    (joining / "0.status").write_text("75")
    machine = supervisor.Supervisor(joining, world=2)
    found: list[str] = []

    def kill() -> None:
        for _ in range(2):
            found.append((run / "ranks" / "node7-1.txt").read_text())
            machine._keep_outputs()  # torchrun has ended, too

    monkeypatch.setattr(machine, "_hostname", "node7")
    monkeypatch.setattr(machine, "_kill_workers", kill)
    with pytest.raises(Left, match="75"):
        machine._leave()
    assert found == ["said\n"] * 2


# torch's loggers keep the log until the supervisor ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_why_machines_could_not_meet_is_told(
    joining: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    def main(_: object) -> None:
        raise RendezvousConnectionError("See inner exception") from OSError("no host of that name\nframe #0")

    monkeypatch.setattr(run, "main", main)
    assert supervisor.Supervisor(joining, world=1).run([]) == 1
    error = "error: the other nodes are unreachable, or too few: no host of that name; make train"
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize("told", [True, False])
def test_the_last_word_of_a_node_that_another_has_left(
    told: bool, joining: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = supervisor.Supervisor(joining, world=1)
    (joining / "0.status").write_text("75")
    monkeypatch.setattr(machine, "_hostname", "node7")
    monkeypatch.setattr(machine, "_signal", signal.SIGTERM * told)
    assert machine._exit_status({0: 75}) == 75
    error = "error: another node has left, and CONFIG_DIST_MAX_RESTARTS=2 leaves no restart; "
    assert capsys.readouterr().err == ("" if told else f"{error}make train resumes\n")


def test_a_worker_knows_who_stops_it(joining: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun restarts those that it stops; the supervisor leaves a note before it forwards a signal."""
    monkeypatch.delenv("ANNEAL_LAUNCH", raising=False)
    assert not launcher.restarts_by_itself(), "no launch"
    monkeypatch.setenv("ANNEAL_LAUNCH", str(joining))
    assert launcher.restarts_by_itself()
    with monkeypatch.context() as alone:
        alone.setenv("ANNEAL_STORE", "file")
        assert not launcher.restarts_by_itself(), "without other nodes"
    machine, sent = supervisor.Supervisor(joining, world=1), list[tuple[int, int]]()
    (joining / "0.pid").write_text("1234567")
    monkeypatch.setattr(os, "kill", lambda *one: sent.append(one))
    monkeypatch.setattr(machine, "_hostname", "")  # does not wait for the worker's end
    machine._forward(signal.SIGTERM)
    assert sent == [(1234567, signal.SIGTERM)] and not launcher.restarts_by_itself()
    shutil.rmtree(joining)
    assert not launcher.restarts_by_itself(), "the launch has ended"
