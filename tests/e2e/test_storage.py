"""A machine is lost with its disk; another one goes on with what was copied to storage."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from lib.runs import metrics
from lib.runs.directory import RunDir, checkpoint_name
from tests.e2e.forked import Forked
from tests.e2e.runner import SHORT, Runner, assert_same_bits

pytestmark = pytest.mark.slow
PATIENCE_SECONDS = 60
LAST, EVERY = 60, 3


def runner_in(folder: Path, url: str, *, steps: int = LAST) -> Runner:
    folder.mkdir()
    runner = Runner(folder)
    settings = {
        "CONFIG_MAX_STEPS": str(steps),
        "CONFIG_CHECKPOINT_INTERVAL_STEPS": str(EVERY),
        "CONFIG_EVAL_INTERVAL_STEPS": "30",
        "CONFIG_EMA": "y",
        "CONFIG_CHECKPOINT_URL": url,
    }
    runner.configure("lenet5", SHORT | settings)
    return runner


def wait_for_copies(process: Forked, bucket: Path, *, count: int) -> bool:
    """Until so many checkpoints have come to storage. Returns whether the run still goes on."""
    deadline, seen = time.monotonic() + PATIENCE_SECONDS, set[str]()
    while len(seen) < count:
        seen |= {path.parent.name for path in bucket.glob("*/*/ckpt/*/manifest.json")}
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return True


def killed_in_between(folder: Path, bucket: Path) -> str:
    """Have a run killed that has copied two checkpoints, and its disk removed. Returns its name."""
    for _ in range(5):  # on a busy machine it can be over before this one looks
        lost = runner_in(folder, f"file://{bucket}")
        process = lost.start("train")
        was_going = wait_for_copies(process, bucket, count=2)
        process.kill()
        output, _ = process.communicate(PATIENCE_SECONDS)
        name, ended = lost.newest().name, lost.newest().status().state == "done"
        shutil.rmtree(folder)
        if was_going and not ended:
            return name
        assert ended, output
        shutil.rmtree(bucket)
    raise AssertionError("every run was over before it was killed")


def test_a_run_goes_on_elsewhere_to_the_same_bits(tmp_path: Path) -> None:
    reference = runner_in(tmp_path / "reference", "")
    reference.run("train")
    bucket = tmp_path / "bucket"
    name = killed_in_between(tmp_path / "lost", bucket)
    copies = sorted(bucket.glob("*/*/ckpt/*/state.pt"))
    assert len(copies) >= 2
    with copies[-1].open("r+b") as file:  # of one that was cut off or is whole
        file.write(b"damage")

    found = runner_in(tmp_path / "found", f"file://{bucket}")
    output = found.run("train")
    run = found.newest()
    assert run.name == name and f"Resuming {run.path}" in output
    assert f"comes from file://{bucket}/lenet5/{name}" in output and "Starting after step 0\n" not in output
    assert_same_bits(reference.weights(), found.weights())
    rows = {row["step"]: row["loss"] for row in metrics.read(run.metrics) if row["kind"] == "train"}
    expected = metrics.read(reference.newest().metrics)
    assert rows == {row["step"]: row["loss"] for row in expected if row["kind"] == "train"}

    remote = RunDir.open(bucket / "lenet5" / name)
    assert remote.status().state == "done" and remote.metrics.read_bytes() == run.metrics.read_bytes()
    kept = {path.name for path in run.checkpoints.glob("step-*")}
    assert kept == {path.parent.name for path in remote.checkpoints.glob("*/manifest.json")}
    assert "accuracy" in found.run("eval", "--best")


def test_a_run_that_is_told_to_stop_has_copied_its_last_checkpoint(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    runner = runner_in(tmp_path / "one", f"file://{bucket}", steps=1_000_000)
    process = runner.start("train")
    assert wait_for_copies(process, bucket, count=1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(PATIENCE_SECONDS)
    assert process.returncode == 75, output
    run = runner.newest()
    remote = RunDir.open(bucket / "lenet5" / run.name)
    assert remote.status().state == "preempted" and remote.status().step == run.status().step
    last = checkpoint_name(run.status().step)
    assert (remote.checkpoints / last / "manifest.json").is_file()
    unknown = runner_in(tmp_path / "two", "nothing://x").run("train", status=2)
    assert 'CONFIG_CHECKPOINT_URL="nothing://x" cannot be opened' in unknown
    assert not (tmp_path / "two" / "runs").exists()
