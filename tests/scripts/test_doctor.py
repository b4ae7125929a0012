"""Checks of a machine: each bad state has a finding, and a broken environment ends none of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.doctor import CHECKS, EXTRAS, FACTS, RULES, interpreter_of, judge, release_of
from tests.support.configs import ROOT

GOOD: dict[str, Any] = {
    **dict.fromkeys(FACTS, ""),
    "system": "Linux",
    "release": "6.1",
    "case_sensitive": True,
    "make": "4.3",
    "python": "3.12.1",
    "venv": ".venv",
    "environment": "ready",
    "interpreter": "python",
    "failure": "it failed",
    "torch": "2.13.0+cu130",
    "build": "CUDA 13.0",
    "kernels": "AVX512",
    "torchvision": "0.28+cu130",
    "kind": "cuda",
    "devices": "H100, 79 of 80 GB free",
    "gpus": 8,
    "nvidia": "NVRM version: 580",
    "cpus": 16,
    "all_cpus": 16,
    "free": 50.0,
    "total": 64.0,
    "shm": 8.0,
    "open_files": 4096,
    "runs": "runs",
    "runs_free": 100.0,
    "runs_writable": True,
    "data_free": 90.0,
    "data_writable": True,
    "data": "mnist",
    "extras": "none",
    "other_extras": "wandb (x)",
}
BAD = [
    ("system", "problem", {"system": "Windows"}),
    ("system", "note", {"system": "Darwin"}),
    ("system", "note", {"release": "5.15.167.4-microsoft-standard-WSL2"}),
    ("system", "note", {"case_sensitive": False}),
    ("make", "note", {"make": "3.81"}),
    ("python", "problem", {"python": "3.10.14"}),
    ("python", "note", {"python": "3.14.0"}),
    ("python", "problem", {"cpus": 0}),
    ("packages", "problem", {"environment": "broken"}),
    ("packages", "note", {"environment": "unfinished"}),
    ("packages", "problem", {"faults": "torch 2.9.1 is older than 2.11"}),
    ("packages", "problem", {"faults": "numpy is missing", "environment": "own"}),
    ("torch", "problem", {"build": "", "kind": ""}),
    ("torch", "note", {"torchvision": "0.28+cpu"}),
    ("devices", "problem", {"kind": ""}),
    ("devices", "problem", {"kind": "cpu", "build": "the CPU"}),
    ("devices", "problem", {"kind": "cpu"}),
    ("devices", "note", {"busy": True}),
    ("cpu", "note", {"kernels": "AVX2"}),
    ("cpu", "note", {"OMP_NUM_THREADS": "17"}),
    ("cpu", "note", {"OMP_PROC_BIND": "true"}),
    ("cpu", "note", {"KMP_DUPLICATE_LIB_OK": "TRUE"}),
    ("memory", "problem", {"free": ""}),
    ("memory", "problem", {"free": 0.9}),
    ("runs", "problem", {"runs_writable": False, "runs_free": 0.0}),
    ("runs", "problem", {"runs_free": 0.5}),
    ("runs", "note", {"runs_free": 9.0}),
    ("data", "problem", {"data_writable": False}),
    ("data", "problem", {"data_free": 0.5}),
    ("processes", "note", {"open_files": 256}),
    ("processes", "note", {"shm": 0.064}),
]


def name_of(title: str) -> str:
    return title.partition(":")[0]


def test_a_good_machine_has_a_summary_of_everything() -> None:
    found = judge(GOOD)
    assert [one["name"] for one in found] == [*dict.fromkeys(name_of(title) for title in CHECKS)]
    assert {one["state"] for one in found} == {"ok"} and not any(one["advice"] for one in found)


@pytest.mark.parametrize(("name", "state", "changes"), BAD, ids=str)
def test_a_bad_state_is_found_alone_and_has_advice(name: str, state: str, changes: dict[str, Any]) -> None:
    (found,) = (one for one in judge(GOOD | changes) if one["state"] != "ok")
    assert (found["name"], found["state"]) == (name, state)
    assert found["advice"] or changes == {"system": "Darwin"}
    assert not re.search(r"[{}]", found["text"] + found["advice"])


def test_every_check_has_a_bad_state_here() -> None:
    states = ((name_of(title), next(iter(RULES[title]))) for title in CHECKS)
    checks = sorted((name, state) for name, state in states if state != "ok")
    assert checks == sorted((name, state) for name, state, _ in BAD)


@pytest.mark.parametrize(
    "changes",
    [
        {"nvidia": "", "kind": "cpu", "build": "the CPU", "gpus": 0, "shm": 0.064},
        {"shm": ""},
        {"torch": "", "torchvision": "", "build": "", "kind": "", "kernels": ""},
        {"OMP_NUM_THREADS": "16"},
        {"torchvision": ""},
        {"torch": "", "build": "", "torchvision": "0.28"},
    ],
    ids=str,
)
def test_what_only_looks_bad_is_no_finding(changes: dict[str, Any]) -> None:
    assert {one["state"] for one in judge(GOOD | changes)} == {"ok"}


def test_versions() -> None:
    assert release_of("2.13.0+cu130") == (2, 13, 0) and release_of("3.81") < (4,) <= release_of("4.3")


def test_extras_are_those_of_the_project() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(EXTRAS) == sorted(declared)


def test_states_of_an_environment(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    assert interpreter_of(venv) == (sys.executable, "unfinished"), "it does not exist"
    (venv / "bin").mkdir(parents=True)
    assert interpreter_of(venv) == (sys.executable, "broken"), "somebody else's directory"
    (venv / ".creating").touch()
    assert interpreter_of(venv) == (sys.executable, "unfinished")
    fake_python(venv, tmp_path)
    (venv / ".stamp").unlink()
    assert interpreter_of(venv) == (str(venv / "bin" / "python"), "unfinished")
    (venv / ".stamp").touch()
    assert interpreter_of(venv) == (str(venv / "bin" / "python"), "ready")


def fake_python(venv: Path, modules: Path) -> None:
    """An environment whose modules are this one's and, before those, the ones in a folder."""
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{modules}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (venv / ".stamp").touch()


def doctored(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    command = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "--json", *arguments]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stderr == ""
    return done.returncode, {one["name"]: one for one in json.loads(done.stdout)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("raise ImportError('libtorch_cpu.so: cannot open')", "ImportError: libtorch_cpu.so: cannot open"),
        ("import os\nos.abort()", "status -6"),
    ],
)
def test_a_broken_torch_is_a_finding_among_others(tmp_path: Path, body: str, failure: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(body)
    fake_python(tmp_path / "venv", tmp_path)
    status, found = doctored(f"--venv={tmp_path / 'venv'}", f"--runs={tmp_path / 'runs'}")
    assert status == 1 and found["torch"]["state"] == "problem"
    assert found["torch"]["text"].endswith(f"fails: {failure}")
    assert {"memory", "cpu", "runs", "data", "extras"} <= found.keys()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_place_that_holds_no_files_cannot_be_written() -> None:
    status, found = doctored("--runs=/proc/nope/runs")
    assert status == 1 and found["runs"]["text"] == "/proc/nope/runs cannot be written"
    assert found["extras"]["text"].startswith(f"of {sys.executable}: installed: ")


@pytest.mark.slow
def test_it_runs_without_an_environment(tmp_path: Path) -> None:
    """Without site-packages there is the standard library only."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    command = ["make", "-s", "doctor", f"VENV={tmp_path / 'none'}", f"PYTHON={bare}", f"O={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = " ".join(done.stdout.split())
    assert re.search(r"note packages \S+none is not complete yet -> make train installs", printed)
    extras = done.stdout.partition("extras ")[2]
    assert extras.count("\n") > 3 and max(map(len, extras.splitlines())) <= 100
    assert "No problem." in done.stdout and not (tmp_path / "none").exists()


@pytest.mark.long
def test_it_reaches_no_network(tmp_path: Path) -> None:
    """A hook ends any Python that looks up a name or connects to another address than the loopback."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def refuse(event, arguments):\n"
        "    if event in ('socket.getaddrinfo', 'socket.connect') and '127.0.0.1' not in str(arguments):\n"
        "        print(event, arguments, file=sys.stderr, flush=True)\n"
        "        os._exit(9)\n"
        "sys.addaudithook(refuse)\n"
    )
    status, found = doctored(PYTHONPATH=str(tmp_path))
    assert status == 0 and found["torch"]["state"] == "ok"
    reach = [sys.executable, "-c", "import socket; socket.create_connection(('192.0.2.1', 80), timeout=0.1)"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(reach, env=environment, capture_output=True).returncode == 9
