"""Setting up: scripts/bootstrap.sh with an interpreter that plays venv and pip, and the probe for real."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts import bootstrap_probe

ROOT = Path(__file__).resolve().parents[2]

# Plays `python`: venv makes a directory, pip notes what it was given. Behaviour is set by files beside it:
# old, new, torch, no-venv, pip-breaks, pip-waits, own-venv (it is itself in a virtual environment).
FAKE = """#!/bin/sh
here=$(dirname "$0"); has() {{ [ -e "$here/$1" ]; }}
case "$1 $2" in
"-c import ensurepip"*) ! has no-venv ;;
"-c "*"(3, 14)"*) ! has new ;;
"-c "*version_info*) ! has old ;;
"-c "*base_prefix*) ! has own-venv ;;
"-c "*python_version*) if has old; then echo 3.10.1; elif has new; then echo 3.14.0
	elif has other; then echo 3.12.5; else echo 3.11.7; fi ;;
"-c "*) exec {python} -c "$2" ;;
"-m venv") for dir; do :; done; echo "$*" >> {log}; mkdir -p "$dir/bin"; cp "$0" "$dir/bin/python"
	if has pip-breaks; then touch "$dir/bin/pip-breaks"; fi
	if has pip-waits; then touch "$dir/bin/pip-waits"; fi
	case "$*" in *system-site*) touch "$dir/bin/torch" ;; esac ;;
"-m pip") case "$*" in *--version*) exit 0 ;; esac
	while has pip-waits; do sleep 0.05; done
	for list; do :; done; echo "$*" >> {log}; cat "$list" >> {log}
	echo "Collecting torch==2.13.0"; echo "  Downloading torch-2.13.0.whl (88 MB)"; ! has pip-breaks ;;
*probe*) [ "$3" != torch ] || has torch ;;
esac
"""


class Bootstrap:
    def __init__(self, directory: Path) -> None:
        self.venv = directory / "venv"
        self.log = directory / "log"
        self.python = directory / "bin" / "python"
        self.python.parent.mkdir()
        self.python.write_text(FAKE.format(python=sys.executable, log=self.log))
        self.python.chmod(0o755)

    def has(self, *behaviours: str) -> None:
        for name in behaviours:
            (self.python.parent / name).touch()

    def lacks(self, *behaviours: str) -> None:
        for name in behaviours:
            (self.python.parent / name).unlink()

    def __call__(
        self, requirements: str = "requirements.txt", *options: str, venv: str | None = None, **given: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                "scripts/bootstrap.sh",
                str(self.venv) if venv is None else venv,
                str(self.python),
                requirements,
                *options,
            ],
            cwd=ROOT,
            env={**os.environ, "PATH": "/usr/bin:/bin", **given},
            capture_output=True,
            text=True,
        )

    def told(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def bootstrap(tmp_path: Path) -> Bootstrap:
    return Bootstrap(tmp_path)


def test_makes_an_environment_and_installs_the_lock(bootstrap: Bootstrap) -> None:
    done = bootstrap()
    assert done.returncode == 0, done.stderr
    assert (bootstrap.venv / ".stamp").exists() and (bootstrap.venv / ".created").exists()
    assert (ROOT / "requirements.lock").read_text() in bootstrap.told()


def test_the_output_of_pip_is_shown_on_request_or_where_it_fails(bootstrap: Bootstrap) -> None:
    bootstrap.has("pip-breaks")
    failed = bootstrap()
    assert failed.returncode == 2
    assert "Downloading torch-2.13.0.whl" in failed.stderr and "pip could not install" in failed.stderr
    bootstrap.lacks("pip-breaks")
    quiet = bootstrap()
    assert "installing PyTorch" in quiet.stderr and "Downloading" not in quiet.stderr
    assert sorted(path.name for path in bootstrap.venv.iterdir()) == [".created", ".stamp", "bin"]
    (bootstrap.venv / ".stamp").unlink()
    assert "Downloading torch-2.13.0.whl" in bootstrap(KCONFIG_VERBOSE="1").stderr


def test_a_terminal_gets_a_line_of_progress(bootstrap: Bootstrap) -> None:
    master, slave = pty.openpty()
    command = ["scripts/bootstrap.sh", str(bootstrap.venv), str(bootstrap.python), "requirements.txt"]
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=ROOT, env=environment, stderr=slave, check=True)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    assert b"\r\x1b[K  packages so far: 1; Downloading torch-2.13.0.whl (88 MB)\r\x1b[K" in shown


def test_an_up_to_date_environment_is_left_alone(bootstrap: Bootstrap) -> None:
    bootstrap()
    before = bootstrap.told()
    assert bootstrap().returncode == 0
    assert bootstrap.told() == before


def test_development_tools_have_a_lock_and_a_stamp_of_their_own(bootstrap: Bootstrap) -> None:
    bootstrap()
    assert not (bootstrap.venv / ".stamp-dev").exists()
    assert bootstrap("requirements-dev.txt").returncode == 0
    assert (bootstrap.venv / ".stamp-dev").exists()
    assert (ROOT / "requirements-dev.lock").read_text() in bootstrap.told()


def test_a_torch_of_the_base_interpreter_is_kept(bootstrap: Bootstrap) -> None:
    bootstrap.has("torch")
    done = bootstrap()
    assert done.returncode == 0, done.stderr
    assert "it is kept" in done.stderr
    told = bootstrap.told()
    assert "--system-site-packages" in told
    assert "\ntorch==" not in told and "sympy" not in told and "numpy==" in told


def test_a_torch_of_an_existing_environment_is_kept(bootstrap: Bootstrap) -> None:
    bin_directory = bootstrap.venv / "bin"
    bin_directory.mkdir(parents=True)
    (bin_directory / "python").write_text(bootstrap.python.read_text())
    (bin_directory / "python").chmod(0o755)
    (bin_directory / "torch").touch()
    assert bootstrap().returncode == 0
    assert "-m venv" not in bootstrap.told() and "\ntorch==" not in bootstrap.told()
    assert not (bootstrap.venv / ".created").exists(), "make mrproper would remove what it did not make"


def test_a_torch_out_of_reach_is_an_error_with_both_ways_out(bootstrap: Bootstrap) -> None:
    bootstrap.has("torch", "own-venv")
    done = bootstrap()
    assert done.returncode == 2
    assert f"make VENV={sys.prefix}" in done.stderr and "PYTHON=" in done.stderr
    assert not bootstrap.venv.exists()


@pytest.mark.slow
def test_interrupted_at_install_starts_again(bootstrap: Bootstrap) -> None:
    bootstrap.has("pip-breaks")
    assert bootstrap().returncode != 0
    assert not (bootstrap.venv / ".stamp").exists()
    (bootstrap.venv / "left-over").touch()
    bootstrap.lacks("pip-breaks")
    done = bootstrap()
    assert done.returncode == 0, done.stderr
    assert not (bootstrap.venv / "left-over").exists()
    assert (bootstrap.venv / ".stamp").exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="there is no flock")
def test_a_second_call_waits_for_the_first(bootstrap: Bootstrap) -> None:
    bootstrap.has("pip-waits")
    waits = bootstrap.venv / "bin" / "pip-waits"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(bootstrap)
        while not waits.exists():
            assert not first.done(), first.result().stderr
            time.sleep(0.01)
        second = pool.submit(bootstrap)
        try:
            with pytest.raises(TimeoutError):
                second.result(timeout=0.5)
        finally:
            waits.unlink()
    assert (first.result().returncode, second.result().returncode) == (0, 0), first.result().stderr
    assert second.result().stderr == "another make prepares an environment: waiting for it\n"
    assert bootstrap.told().count("-m venv") == 1


def test_interrupted_before_there_is_an_interpreter_starts_again(bootstrap: Bootstrap) -> None:
    bootstrap.venv.mkdir()
    (bootstrap.venv / ".creating").touch()
    (bootstrap.venv / "lib").mkdir()
    assert bootstrap().returncode == 0
    assert (bootstrap.venv / ".stamp").exists()


def test_an_environment_whose_interpreter_has_gone_is_made_again(bootstrap: Bootstrap) -> None:
    bootstrap()
    (bootstrap.venv / "bin" / "python").unlink()
    assert bootstrap().returncode == 0
    assert (bootstrap.venv / "bin" / "python").exists()


def test_a_directory_of_somebody_else_is_not_touched(bootstrap: Bootstrap) -> None:
    bootstrap.venv.mkdir()
    (bootstrap.venv / "letters").touch()
    done = bootstrap()
    assert done.returncode == 2
    assert "is not a working virtual environment" in done.stderr
    assert [path.name for path in bootstrap.venv.iterdir()] == ["letters"]


def test_an_old_python_is_named(bootstrap: Bootstrap) -> None:
    bootstrap.has("old")
    done = bootstrap()
    assert done.returncode == 2
    assert "is Python 3.10.1, 3.11 or later is needed" in done.stderr
    assert not bootstrap.venv.exists()


def test_a_python_without_a_lock_is_refused_before_anything_is_made(bootstrap: Bootstrap) -> None:
    bootstrap.has("new")
    done = bootstrap()
    assert done.returncode == 2 and not bootstrap.venv.exists()
    assert "is Python 3.14.0, requirements.lock is for 3.11 to 3.13" in done.stderr
    assert "PYTHON=" in done.stderr and "VENV=" in done.stderr


def test_a_missing_python_is_named(bootstrap: Bootstrap) -> None:
    bootstrap.python.unlink()
    done = bootstrap()
    assert done.returncode == 2
    assert "there is no " in done.stderr


def test_a_missing_venv_module_is_named(bootstrap: Bootstrap) -> None:
    bootstrap.has("no-venv")
    done = bootstrap()
    assert done.returncode == 2
    assert "python3-venv" in done.stderr and "VENV=" in done.stderr


def test_another_python_than_the_one_asked_for_is_an_error(bootstrap: Bootstrap) -> None:
    bootstrap()
    bootstrap.has("other")
    assert bootstrap().returncode == 0
    done = bootstrap("requirements.txt", "--same-python")
    assert done.returncode == 2
    assert "has Python 3.11.7, not the 3.12.5" in done.stderr


def test_a_path_with_a_space(bootstrap: Bootstrap, tmp_path: Path) -> None:
    bootstrap.venv = tmp_path / "my environment"
    assert bootstrap().returncode == 0
    assert (bootstrap.venv / ".stamp").exists()


def test_without_venv_nothing_is_installed() -> None:
    done = subprocess.run(
        ["scripts/bootstrap.sh", "", sys.executable, "requirements.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_without_venv_what_is_missing_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: no site-packages
    bare.chmod(0o755)
    done = subprocess.run(
        ["scripts/bootstrap.sh", "", str(bare), "requirements.txt"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "torch is missing, kconfiglib is missing, numpy is missing, pyyaml is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_uv_is_used_where_there_is_one(bootstrap: Bootstrap, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    uv = tools / "uv"
    uv.write_text(
        f'#!/bin/sh\necho uv "$@" >> {bootstrap.log}\n[ "$1" = pip ] && exit\nfor dir; do :; done\n'
        f'mkdir -p "$dir/bin"; cp {bootstrap.python} "$dir/bin/python"\n'
    )
    uv.chmod(0o755)
    done = subprocess.run(
        ["scripts/bootstrap.sh", str(bootstrap.venv), str(bootstrap.python), "requirements.txt"],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = bootstrap.told().splitlines()
    assert told[0].startswith("uv venv") and told[1].startswith("uv pip install")
    assert not [line for line in told if line.startswith("-m")]


@pytest.mark.parametrize(
    ("name", "minimum", "fault"),
    [
        ("rich", "1.0", None),
        ("pyyaml", "1.0", None),
        ("pytest-xdist", "1.0", None),
        ("no-such-thing", "1.0", "no-such-thing is missing"),
    ],
)
def test_probe(name: str, minimum: str, fault: str | None) -> None:
    assert bootstrap_probe.fault_of(name, minimum=minimum) == fault


def test_probe_compares_releases_as_numbers() -> None:
    release = bootstrap_probe.release
    assert release("2.9.1") < release("2.11") < release("2.13.0+cpu")
    assert release("2.12.0a0+git1234") == (2, 12, 0)
    assert "older than 9999" in (bootstrap_probe.fault_of("rich", minimum="9999") or "")


def test_probe_reads_the_version_of_a_package_built_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "builtinplace"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text("__version__ = '2.12.0a0+rocm'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bootstrap_probe.fault_of("builtinplace", minimum="2.9") is None
    assert "2.12.0a0+rocm is older than 2.13" in (
        bootstrap_probe.fault_of("builtinplace", minimum="2.13") or ""
    )


def test_beside_torch_xla_the_torch_of_its_number_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": "2.9.0", "torch_xla": "2.9.0"}
    monkeypatch.setattr(bootstrap_probe, "_version", versions.get)
    assert bootstrap_probe.fault_of("torch", minimum="2.11") == "torch 2.9.0 is older than 2.11"
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bootstrap_probe.fault_of("torch", minimum="2.11") is None
    versions["torch"] = "2.8.0"
    assert bootstrap_probe.fault_of("torch", minimum="2.11") == "torch 2.8.0 is older than 2.9.0"


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pins = (line.split("#")[0].strip().split("==") for line in lines if "==" in line)
    return {pin.lower(): version for pin, version in pins}


@pytest.mark.parametrize("part", ["requirements", "requirements-dev"])
def test_the_lock_satisfies_the_ranges(part: str) -> None:
    ranges = bootstrap_probe.requirements_of(ROOT / f"{part}.txt")
    pins = locked(f"{part}.lock")
    for name, minimum in ranges.items():
        assert bootstrap_probe.release(pins[name.lower()]) >= bootstrap_probe.release(minimum), name


def test_both_locks_agree_where_they_overlap() -> None:
    run, dev = locked("requirements.lock"), locked("requirements-dev.lock")
    assert {name: run[name] for name in run.keys() & dev.keys()} == {
        name: dev[name] for name in run.keys() & dev.keys()
    }


def test_the_core_is_the_six_packages_and_no_other() -> None:
    names = set(bootstrap_probe.requirements_of(ROOT / "requirements.txt"))
    assert names == {"torch", "kconfiglib", "numpy", "pyyaml", "matplotlib", "rich"}
    direct = [
        line.split("==")[0]
        for line in (ROOT / "requirements.lock").read_text().splitlines()
        if "==" in line and "# via" not in line
    ]
    assert {name.lower() for name in direct} == names
