"""Runs that nobody listens to or that were tampered with: nobody is told that all is well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runner import ROOT, TINY, Runner

pytestmark = pytest.mark.slow


def test_a_run_that_nobody_listens_to_is_not_done(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", TINY)
    runner.run("plan")  # makes the data
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "train", "--runs", str(runner.runs), "train"],
        cwd=ROOT,
        env=os.environ | {"KCONFIG_CONFIG": str(tmp_path / ".config")},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr.startswith("error: nobody reads standard output any more; make train > FILE")


def test_a_run_that_was_tampered_with_is_told(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", TINY)
    runner.run("train")
    run = runner.newest()
    assert "is not what the run was made with" not in runner.run("eval")
    config, plan = run.config.read_text(), run.path / "plan.json"
    run.config.write_text(config.replace("CONFIG_SEED=1", "CONFIG_SEED=2"))
    assert f"{run.config} is not what the run was made with" in runner.run("eval")
    run.config.write_text(config)
    plan.write_text(plan.read_text().replace('"micro_batch":', '"batch_per_device":'))
    output = runner.run("eval", status=1)
    assert "Traceback" not in output and f"the plan of {run.path} cannot be read" in output
