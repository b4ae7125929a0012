"""Runs that are interrupted, not listened to or tampered with: nobody is told that all is well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.rundir import RunDir
from tests.e2e.runner import ROOT, TINY, Runner
from train.commands import _tell_end
from train.stop import Stopped


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, model="lenet5", identity="0123abcd", files={"config": ""})
    run.set_status("running", step=5)
    return run


def test_a_run_says_what_ended_it(run: RunDir) -> None:
    expected = {
        Stopped(2, 7): ("preempted", 7, "stopped by SIGINT after step 7"),
        KeyboardInterrupt(): ("preempted", 5, "interrupted"),
        ValueError("bad"): ("failed", 5, "bad"),
        AssertionError(): ("failed", 5, "AssertionError"),
    }
    for error, (state, step, reason) in expected.items():
        run.set_status("running", step=5)
        _tell_end(run, error)
        status = run.status()
        assert (status.state, status.step) == (state, step) and status.reason.startswith(reason)


def test_a_run_that_is_done_stays_done(run: RunDir) -> None:
    run.set_status("done", step=9)
    _tell_end(run, KeyboardInterrupt())
    assert (run.status().state, run.status().step) == ("done", 9)


def test_of_a_run_that_is_gone_nothing_is_left(run: RunDir) -> None:
    for path in run.path.iterdir():
        path.unlink()
    _tell_end(run, ValueError("bad"))
    assert not list(run.path.iterdir())


@pytest.mark.slow
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


@pytest.mark.slow
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
