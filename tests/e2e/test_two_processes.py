"""What ends a run on several processes early changes nothing but its time."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from lib.errors import ToolkitError
from lib.runs import metrics
from lib.runs.directory import RunDir, checkpoint_name
from tests.e2e.runner import BRIEF, ROOT, Runner, assert_same_bits, wait_for_checkpoint, wait_for_log
from tests.support.once import made_once

pytestmark = pytest.mark.slow

STEPS, EVERY = 60, 5
SETTINGS = BRIEF | {
    "CONFIG_MAX_STEPS": str(STEPS),
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_NUM_DEVICES": "2",
    "CONFIG_DIST_STRATEGY_FSDP": "y",
    "CONFIG_CHANNELS_LAST": "n",
    "CONFIG_CHECKPOINT_INTERVAL_STEPS": str(EVERY),
}
# Python runs it in every process when it starts. The second process waits until there is a checkpoint, and is
# then killed; the first may have a thread that copies.
KILL_WHEN_SAVED = """
import os
if os.environ.get("RANK") == "1":
    import pathlib, time
    import train.loop
    original = train.loop.optimizer_step
    def optimizer_step(job, progress, **options):
        while progress.step + 1 == {step}:
            if list(pathlib.Path({runs!r}).glob("*/*/ckpt/{saved}/manifest.json")):
                os.kill(os.getpid(), 9)
            time.sleep(0.01)
        return original(job, progress, **options)
    train.loop.optimizer_step = optimizer_step
"""


def runner_in(folder: Path, **others: str) -> Runner:
    folder.mkdir(exist_ok=True)
    runner = Runner(folder, forks=True)
    runner.configure("lenet5", SETTINGS | others)
    return runner


def run_until_killed(runner: Runner, **values: object) -> str:
    (runner.folder / "sitecustomize.py").write_text(KILL_WHEN_SAVED.format(**values))
    return runner.run("train", status=1, PYTHONPATH=os.pathsep.join([str(runner.folder), str(ROOT)]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A run that nothing ended early."""
    return Runner(made_once(tmp_path_factory, "two", lambda folder: runner_in(folder).run("train")))


def test_an_interrupted_run_on_two_processes_ends_in_the_same_bits(whole: Runner, tmp_path: Path) -> None:
    """It writes sharded checkpoints beside training, the other run full ones."""
    runner = runner_in(tmp_path, CONFIG_CHECKPOINT_ASYNC="y", CONFIG_CHECKPOINT_FORMAT_SHARDED="y")
    process = runner.start("train")
    wait_for_checkpoint(runner, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    run = runner.newest()
    assert run.status().state == "preempted" and 0 < run.status().step < STEPS
    process = runner.start("train")
    wait_for_log(runner, process, f"Starting after step {run.status().step}")
    with pytest.raises(ToolkitError, match="is in use"):
        run.lock()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0 and run.status().state == "done", output
    assert "Checkpoints: sharded, as requested" in output
    assert "Checkpoints: full; " in (whole.newest().log).read_text()
    assert_same_bits(runner.weights(), whole.weights())
    evaluated = runner.run("eval").splitlines()[-1]  # by one process
    assert evaluated.partition(": ")[2] in (whole.newest().log).read_text()


def test_a_run_on_two_processes_goes_on_elsewhere_to_the_same_bits(whole: Runner, tmp_path: Path) -> None:
    bucket, copied, step = tmp_path / "bucket", checkpoint_name(2 * EVERY), 2 * EVERY + 2
    settings = {"CONFIG_CHECKPOINT_URL": f"file://{bucket}", "CONFIG_DIST_MAX_RESTARTS": "0"}
    settings |= {"CONFIG_CHECKPOINT_FORMAT_SHARDED": "y"}
    lost = runner_in(tmp_path / "lost", **settings)
    killed = run_until_killed(lost, step=step, runs=str(bucket), saved=copied)
    assert "process 1 of 2 was ended by signal 9" in killed
    name = lost.newest().name
    shutil.rmtree(lost.folder)

    found = runner_in(tmp_path / "found", **settings)
    output = found.run("train")
    assert f"Checkpoint {copied} comes from" in output and f"Starting after step {2 * EVERY}" in output
    assert found.newest().name == name and found.newest().status().state == "done"
    assert_same_bits(whole.weights(), found.weights())
    assert RunDir.open(bucket / "lenet5" / name).status().state == "done"


@pytest.mark.long
def test_a_killed_run_goes_on_with_other_numbers_of_devices(whole: Runner, tmp_path: Path) -> None:
    """64 samples on 3, 2 and 4 devices, of which the first have unequal shares."""
    settings = {"CONFIG_DIST_MAX_RESTARTS": "0"}
    for devices, saved in ((3, 2 * EVERY), (2, 4 * EVERY)):
        runner = runner_in(tmp_path, CONFIG_NUM_DEVICES=str(devices), **settings)
        values = {"step": saved + 3, "runs": str(runner.runs), "saved": checkpoint_name(saved)}
        assert f"process 1 of {devices} was ended by signal 9" in run_until_killed(runner, **values)
    runner = runner_in(tmp_path, CONFIG_NUM_DEVICES="4", **settings)
    assert f"Starting after step {4 * EVERY}" in runner.run("train")
    run = runner.newest()
    assert run.status().state == "done" and len(list(runner.runs.glob("*/*"))) == 1
    assert run.read_json("plan")["world"] == 4
    found, expected = (
        {row["step"]: row["loss"] for row in metrics.read(each.newest().metrics) if row["kind"] == "train"}
        for each in (runner, whole)
    )
    assert found.keys() == expected.keys()
    # Later, rounding in fp32 grows by itself.
    early = {step for step in expected if step <= 6 * EVERY}
    assert len(early) == 6
    assert {step: found[step] for step in early} == pytest.approx(
        {step: expected[step] for step in early}, rel=1e-5
    )
