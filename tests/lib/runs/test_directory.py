import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lib import atomic
from lib.errors import ConfigError, ToolkitError
from lib.runs import directory
from lib.runs.directory import RunDir, checkpoint_name, resolve_run
from lib.runs.identity import identity

ROOT = Path(__file__).parents[3]
FILES: dict[str, Any] = {
    "config": "CONFIG_SEED=1\n",
    "plan": {"world": 1, "reasons": {"world": "one CPU"}},
}
HASH = "0123abcd"


def create(runs: Path, *, model: str = "lenet5", identity: str = HASH) -> RunDir:
    return RunDir.create(runs, model=model, identity=identity, files=FILES)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A clock that shows second [0] of a certain minute."""
    second = [0]
    monkeypatch.setattr(directory, "_now", lambda: datetime(2031, 2, 3, 4, 5, second[0], tzinfo=UTC))
    yield second


# Identity


def test_identity_ignores_the_order() -> None:
    some: dict[str, Any] = {"B": 1, "A": 0.5, "C": (1, 2), "D": None, "E": "é"}
    assert identity(some) == identity(dict(reversed(some.items())))
    assert re.fullmatch("[0-9a-f]{8}", identity(some))


def test_identity_is_of_the_values() -> None:
    assert (
        identity({"LR": float("1e-3")})
        == identity({"LR": float("0.001")})
        == identity({"LR": float(".0010")})
    )
    different: list[Any] = [1, 1.5, "1", True, False, None, (1,), (1.5,), "", 0]
    assert len({identity({"A": value}) for value in different}) == len(different)
    assert identity({"A": 1}) != identity({"A": 1, "B": None})


# Creation


def test_a_new_run_has_its_files(tmp_path: Path, clock: list[int]) -> None:
    clock[0] = 6
    run = create(tmp_path / "runs")
    assert run.path == tmp_path / "runs" / "lenet5" / f"20310203T040506Z-{HASH}"
    assert (run.model, run.identity) == ("lenet5", HASH)
    assert run.config.read_text() == FILES["config"]
    assert run.read_json("plan") == FILES["plan"]
    status = run.status()
    assert (status.state, status.step, status.pid) == ("running", 0, os.getpid())
    assert [path.name for path in run.path.parent.iterdir()] == [run.name]
    run.release()


def test_two_runs_in_one_second(tmp_path: Path, clock: list[int]) -> None:
    assert clock == [0]
    runs = [create(tmp_path) for _ in range(11)]
    names = [run.name for run in runs]
    base = f"20310203T040500Z-{HASH}"
    assert names == [base, *(f"{base}-{number}" for number in range(2, 12))]
    assert {run.identity for run in runs} == {HASH}
    assert resolve_run(tmp_path).name == f"{base}-11"
    for run in runs:
        run.release()


def test_two_processes_never_share_a_directory(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lib.runs.directory import RunDir\n"
        f"runs, files = Path({str(tmp_path)!r}), {{'config': ''}}\n"
        "sys.stdin.readline()\n"
        f"for _ in range(20): print(RunDir.create(runs, model='m', identity={HASH!r}, files=files).name)"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) for _ in range(2)]
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    names = [name for child in children for name in child.communicate(timeout=60)[0].split()]
    assert len(names) == len(set(names)) == 40


def test_what_cannot_be_created_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolkitError, match=r"cannot create a run directory in .*file/lenet5: Not a dir"):
        create(tmp_path / "file")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ToolkitError, match=r"in .*runs/lenet5: No space left on device; O= names"):
            create(tmp_path / "runs")
    assert list((tmp_path / "runs" / "lenet5").iterdir()) == []


# Status


def test_status_round_trip(tmp_path: Path) -> None:
    run = create(tmp_path)
    run.set_status(
        "failed", step=12, reason="the loss is NaN", accuracy=0.5, loss=float("nan"), data="digits"
    )
    status = RunDir.open(run.path).status()
    assert (status.state, status.step, status.reason) == ("failed", 12, "the loss is NaN")
    assert status.facts == {"accuracy": 0.5, "loss": None, "data": "digits"}
    run.release()


@pytest.mark.parametrize(
    "text", ["", '{"state": "run', "[1]", "3", '{"step": 3}', '{"state": "done", "x": 1}', "\0\0"]
)
def test_a_damaged_status_is_told(tmp_path: Path, text: str) -> None:
    run = create(tmp_path)
    (run.path / "status.json").write_text(text)
    assert run.status().state == "unknown" and run.status().reason.startswith("status.json is damaged")
    (run.path / "status.json").unlink()
    assert run.status().reason == "status.json is missing"
    run.release()
    assert find(tmp_path) == run.name


def test_a_status_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ToolkitError, match="No space left on device"):
            run.set_status("done", step=3)
        with pytest.raises(ToolkitError, match="No space left on device"):
            run.write("plan", {})
    assert run.status().state == "running"
    assert run.read_json("plan") == FILES["plan"]
    run.release()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    run = create(tmp_path)
    with pytest.raises(ToolkitError, match=r"cannot read .*hardware\.json: No such file"):
        run.read_json("hardware")
    for data in (b"{", b"[]", b"\xff"):
        (run.path / "plan.json").write_bytes(data)
        with pytest.raises(ToolkitError, match=r"plan\.json is damaged"):
            run.read_json("plan")
    run.release()


# Interrupted runs


def find(runs: Path) -> str | None:
    run = RunDir.find_interrupted(runs, model="lenet5", is_same=lambda run: run.identity == HASH, log=print)
    if run is None:
        return None
    run.release()
    return run.name


def test_the_newest_interrupted_run_of_the_same_configuration(tmp_path: Path, clock: list[int]) -> None:
    assert find(tmp_path) is None
    made = []
    for clock[0] in range(4):
        run = create(tmp_path)
        run.release()
        made.append(run)
    clock[0] = 50
    create(tmp_path, identity="ffffffff").release()
    create(tmp_path, model="resnet18").release()
    os.utime(made[0].path, (4e9, 4e9))  # times of the file system say nothing
    assert find(tmp_path) == made[3].name
    made[3].set_status("done", step=1)
    made[2].set_status("failed", step=1)
    assert find(tmp_path) == made[2].name
    made[2].lock()
    assert find(tmp_path) == made[1].name
    made[2].release()
    for run in made:
        run.set_status("done", step=1)
    assert find(tmp_path) is None
    for run in made:  # having been looked at, they are free
        run.lock()
        run.release()


def test_of_one_second_the_run_that_got_further(tmp_path: Path, clock: list[int]) -> None:
    assert clock == [0]
    runs = [create(tmp_path) for _ in range(3)]
    for run, step in zip(runs, (5, 9, 7), strict=True):
        (run.checkpoints / checkpoint_name(step)).mkdir(parents=True)
        run.release()
    assert find(tmp_path) == resolve_run(tmp_path).name == runs[1].name


def test_a_killed_process_leaves_its_run_free(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from lib.runs.directory import RunDir\n"
        f"runs, files = Path({str(tmp_path)!r}), {{'config': ''}}\n"
        f"run = RunDir.create(runs, model='lenet5', identity={HASH!r}, files=files)\n"
        "print(run.path, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    run = RunDir.open(Path(child.stdout.readline().strip()))
    try:
        assert find(tmp_path) is None
        with pytest.raises(ToolkitError, match=f"is in use: process {child.pid} "):
            run.lock()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert run.status().state == "running"
    assert find(tmp_path) == run.name
    run.lock()
    run.release()


def test_a_run_that_a_reader_looks_at_for_a_moment_is_not_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path)
    run.release()
    busy = 0

    def flock(descriptor: int, how: int, original: Any = fcntl.flock) -> None:
        nonlocal busy
        busy -= 1
        if busy >= 0:
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        original(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(atomic.time, "sleep", lambda _: None)
    busy = 9
    assert find(tmp_path) == run.name
    busy = 9
    run.lock()
    run.release()
    busy = 99
    assert run.in_use and busy == 98, "which readers find out at once"
    assert find(tmp_path) is None
    with pytest.raises(ToolkitError, match="is in use"):
        run.lock()


# RUN=


@pytest.fixture
def three(tmp_path: Path, clock: list[int]) -> list[RunDir]:
    made = []
    for clock[0], (model, name) in enumerate(
        [("lenet5", HASH), ("resnet18", "ffffffff"), ("lenet5", "0123abce")]
    ):
        made.append(create(tmp_path, model=model, identity=name))
        made[-1].release()
    (tmp_path / "notes.txt").write_text("not a model")
    (tmp_path / "lenet5" / "renamed-by-hand").mkdir()
    return made


def test_a_run_by_name(tmp_path: Path, three: list[RunDir]) -> None:
    old, middle, new = (run.path for run in three)
    assert resolve_run(tmp_path).path == new
    assert resolve_run(tmp_path, str(old)).path == old
    assert resolve_run(tmp_path, middle.name).path == middle
    assert resolve_run(tmp_path, "20310203T040501").path == middle
    assert resolve_run(tmp_path, f"resnet18/{middle.name}").path == middle
    assert resolve_run(tmp_path, "resnet18/").path == middle
    renamed = old.rename(old.with_name("my-run"))
    assert resolve_run(tmp_path, str(renamed)).path == renamed


def test_an_exact_name_is_not_ambiguous(tmp_path: Path, clock: list[int]) -> None:
    assert clock == [0]
    first, second = create(tmp_path), create(tmp_path)
    assert second.name.startswith(first.name)
    assert resolve_run(tmp_path, first.name).path == first.path
    first.release()
    second.release()


def test_a_name_that_is_not_one_run_lists_the_candidates(tmp_path: Path, three: list[RunDir]) -> None:
    old, middle, new = (f"{run.model}/{run.name}" for run in three)
    with pytest.raises(ConfigError, match=f"RUN=lenet5 could be 2 runs; choose one of {new}, {old}$"):
        resolve_run(tmp_path, "lenet5")
    with pytest.raises(ConfigError, match=f"RUN=nothing is not .*; choose one of {new}, {middle}, {old}$"):
        resolve_run(tmp_path, "nothing")
    with pytest.raises(ConfigError, match=f"the directory {tmp_path} has no file called config; choose one"):
        resolve_run(tmp_path, str(tmp_path))


def test_a_run_that_is_done_is_known_but_not_gone_on_with(tmp_path: Path, three: list[RunDir]) -> None:
    done, going = three[0], three[1]
    for run in (done, three[2]):
        run.set_status("done", step=3)
    for name in (done.name, f"lenet5/{done.name}", str(done.path), "lenet5"):
        with pytest.raises(ConfigError, match=f"RUN={name} is done; start one with make train"):
            resolve_run(tmp_path, name, unfinished=True)
    for name in ("", "resnet18", "2031"):
        assert resolve_run(tmp_path, name, unfinished=True).path == going.path
    with pytest.raises(ToolkitError, match=f"choose one of resnet18/{going.name}$"):
        resolve_run(tmp_path, "nothing", unfinished=True)
    going.set_status("done", step=3)
    with pytest.raises(ToolkitError, match="there is no run to resume: all are done"):
        resolve_run(tmp_path, unfinished=True)


def test_runs_that_are_not_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "a", tmp_path / "b"):
        with pytest.raises(ToolkitError, match=f"there is no run in {path}: it is not a directory"):
            resolve_run(path)
        with pytest.raises(ToolkitError, match=r"cannot create a run directory .*; O= names another"):
            create(path)


def test_many_candidates_are_cut_off(tmp_path: Path, clock: list[int]) -> None:
    for clock[0] in range(15):
        create(tmp_path).release()
    with pytest.raises(ToolkitError, match="could be 15 runs") as caught:
        resolve_run(tmp_path, "2031")
    assert str(caught.value).endswith(f" and 5 more (ls {tmp_path}/*)")
    assert str(caught.value).count("lenet5/") == 10


def test_no_run_at_all(tmp_path: Path) -> None:
    for runs in (tmp_path, tmp_path / "nowhere"):
        for name, start in (("", ""), ("nope", "RUN=nope: ")):
            with pytest.raises(ConfigError, match=f"^{start}there is no run in .*; make one with make"):
                resolve_run(runs, name)
    with pytest.raises(ToolkitError, match="is not a run directory"):
        RunDir.open(tmp_path)


def test_no_torch_is_needed_to_find_a_run() -> None:
    code = "import sys, lib.runs.directory; assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_file_is_json_or_text(tmp_path: Path) -> None:
    files = dict.fromkeys(directory.TEXTS, "text") | {name: {"a": (1, 2)} for name in directory.OBJECTS}
    run = RunDir.create(tmp_path, model="m", identity=HASH, files=files)  # type: ignore[arg-type]
    for name in directory.TEXTS:
        assert (run.path / name).read_text() == "text"
    for name in directory.OBJECTS:
        assert run.read_json(name) == {"a": [1, 2]}
    run.release()


def test_an_interrupted_run_without_its_configuration_is_reported(tmp_path: Path) -> None:
    lost = tmp_path / "lenet5" / "20260102T030405Z-0123abcd"
    (RunDir(lost).checkpoints / "step-00000040").mkdir(parents=True)
    logged: list[str] = []
    found = RunDir.find_interrupted(tmp_path, model="lenet5", is_same=lambda _: True, log=logged.append)
    assert found is None and len(logged) == 1 and "its file config is missing" in logged[0]
