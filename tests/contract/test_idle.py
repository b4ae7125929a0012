"""What a run uses is removed by no target of make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.runs.directory import RunDir

ELSEWHERE = [pytest.param(place, marks=pytest.mark.slow) for place in ("D/runs", "build/lenet5/runs")]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["runs", *ELSEWHERE])
def test_nothing_that_a_process_trains_in_is_removed(place: str, tree: Path) -> None:
    run = RunDir.create(tree / place, model="lenet5", identity="0123abcd", files={"config": ""})
    (tree / "data").mkdir()
    output = ["O=D"] if place == "D/runs" else []
    for target in ("distclean", "mrproper", "data-clean"):
        done = subprocess.run(
            ["make", target, f"PYTHON={sys.executable}", *output], cwd=tree, capture_output=True, text=True
        )
        told = f"{run.path.relative_to(tree)} is in use: process {os.getpid()} on "
        assert done.returncode == 2 and told in done.stderr, done.stderr
        assert run.config.is_file() and (tree / "data").is_dir()
    run.release()
    command = ["make", "distclean", f"PYTHON={sys.executable}", *output]
    subprocess.run(command, cwd=tree, capture_output=True, check=True)
    assert not run.path.exists()
    without = ["make", "distclean", "data-clean", "PYTHON=/nonexistent"]
    subprocess.run(without, cwd=tree, capture_output=True, check=True)
