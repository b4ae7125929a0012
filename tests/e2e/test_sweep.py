"""`make sweep`: runs in processes of their own, a failing one among them, a table, and nothing done twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.forked import Forked
from tests.e2e.runner import BRIEF, ROOT

pytestmark = pytest.mark.slow


def sweep(file: Path | str, out: Path) -> tuple[int, str]:
    """Exit status, and what it says."""
    words = ["--out", str(out), str(file)]
    environment = os.environ | {"KCONFIG_CONFIG": str(out / "no-config")}  # by which its processes are named
    process = Forked(
        "scripts.sweep", words, environment=environment, output=out.with_suffix(".log"), ranks=True
    )
    said, _ = process.communicate(timeout=300)
    return process.wait(), said


def test_a_sweep_with_a_run_that_fails(tmp_path: Path) -> None:
    settings = {name.removeprefix("CONFIG_"): value for name, value in BRIEF.items()} | {"MAX_STEPS": "6"}
    lines = "".join(f"  {name}: {'true' if value == 'y' else value}\n" for name, value in settings.items())
    file = tmp_path / "study.yaml"
    lines += "  OPTIMIZER_SGD: true\n"
    axes = "seeds: [1]\naxes: {LEARNING_RATE: [0.01, 100.0]}\n"
    file.write_text(f"about: a trial\nconfig: lenet5\nset:\n{lines}{axes}")
    status, first = sweep(file, tmp_path / "out")
    assert status == 1 and "error: 1 of 2 runs failed" in first, first
    assert "training has diverged" in first
    assert "; a run needs 0." in first and "GB (predicted); " in first
    assert "LEARNING_RATE=0.01   1/1" in first and "LEARNING_RATE=100.0  0/1" in first
    status, again = sweep(file, tmp_path / "out")
    assert status == 1 and again.count("already there") == 1
    assert "1 worker: there is 1 run to train" in again


def test_a_sweep_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    there = sorted(file.stem for file in (ROOT / "defconfigs" / "sweeps").glob("*.yaml"))
    status, said = sweep("no-such", tmp_path / "out")
    assert status == 2 and f"SWEEP= is one of {', '.join(there)}" in said
