"""What the supervisor and its workers are told, and what a worker leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lib import launcher

ROOT = Path(__file__).resolve().parents[2]


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
            launcher.launch({"a": 1}, world=2, cpu_count=9, arguments=["--runs", "elsewhere", "train"])
        path, arguments, environment = replaced.pop()
        assert path == arguments[0] == sys.executable
        assert arguments[1:3] == ["-m", "lib.launcher"]
        assert arguments[4:] == ["2", "--runs", "elsewhere", "train"]
        assert environment["OMP_NUM_THREADS"] == used
        shutil.rmtree(arguments[3])


def worker(notes: Path | None, code: str) -> subprocess.CompletedProcess[str]:
    """A process that runs `code`; of a launch where there are notes."""
    variables = {**os.environ, "RANK": "0"}
    if notes is not None:
        variables["ANNEAL_LAUNCH"] = str(notes)
    return subprocess.run(
        [sys.executable, "-c", f"from lib import launcher\n{code}"],
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
    process = worker(None, "import sys; print('torch' in sys.modules)")
    assert process.stdout == "False\n"
