"""`make sweep`: runs in processes of their own, a failing one among them, a table, and nothing done twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runner import ROOT, TINY

pytestmark = pytest.mark.slow


def sweep(file: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.sweep", "--out", str(out), str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_sweep_with_a_run_that_fails(tmp_path: Path) -> None:
    settings = {name.removeprefix("CONFIG_"): value for name, value in TINY.items()} | {"MAX_STEPS": "6"}
    lines = "".join(f"  {name}: {'true' if value == 'y' else value}\n" for name, value in settings.items())
    file = tmp_path / "study.yaml"
    lines += "  OPTIMIZER_SGD: true\n"
    axes = "seeds: [1]\naxes: {LEARNING_RATE: [0.01, 100.0]}\n"
    file.write_text(f"about: a trial\nconfig: lenet5\nset:\n{lines}{axes}")
    first = sweep(file, tmp_path / "out")
    assert first.returncode == 1 and "error: 1 of 2 runs failed" in first.stderr, first.stdout + first.stderr
    assert "training has diverged" in first.stderr
    assert "; a run needs 0." in first.stdout and "GB (predicted); " in first.stdout
    assert "LEARNING_RATE=0.01   1/1" in first.stdout and "LEARNING_RATE=100.0  0/1" in first.stdout
    again = sweep(file, tmp_path / "out")
    assert again.returncode == 1 and again.stdout.count("already there") == 1
    assert "1 worker: there is 1 run to train" in again.stdout


def test_a_sweep_that_is_not_there_is_told_with_those_that_are() -> None:
    there = sorted(file.stem for file in (ROOT / "defconfigs" / "sweeps").glob("*.yaml"))
    done = sweep(Path("no-such"), Path("out"))
    assert done.returncode == 2 and f"SWEEP= is one of {', '.join(there)}" in done.stderr
