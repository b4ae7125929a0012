"""A killed process costs the steps since the last checkpoint and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.runner import BRIEF, ROOT, Runner

pytestmark = pytest.mark.slow

STEPS, EVERY, KILLED_AT = 16, 5, 13
COURSE = {
    "CONFIG_DEVICE_CPU": "y",
    "CONFIG_MAX_STEPS": str(STEPS),
    "CONFIG_CHECKPOINT_INTERVAL_STEPS": str(EVERY),
    "CONFIG_LOG_INTERVAL_STEPS": "1",
    "CONFIG_CHANNELS_LAST": "n",
    "CONFIG_NUM_DEVICES": "2",
    "CONFIG_DIST_STRATEGY_FSDP": "y",
}
# Python runs it in every process when it starts. Only the first process to come to that step is killed.
KILL_ONCE = """
import os
if os.environ.get("RANK") == "1" and not os.path.exists({marker!r}):
    import train.loop
    original = train.loop.optimizer_step
    def optimizer_step(job, progress, **options):
        if progress.step + 1 == {step}:
            open({marker!r}, "x").close()
            os.kill(os.getpid(), 9)
        return original(job, progress, **options)
    train.loop.optimizer_step = optimizer_step
"""


def losses(runner: Runner) -> list[tuple[int, float]]:
    rows = map(json.loads, runner.newest().metrics.read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]


def test_a_killed_process_costs_less_than_a_checkpoint_interval(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (Runner(folder, forks=True) for folder in folders)
    for runner in (one, two):  # both on two devices: another split rounds differently
        runner.configure("lenet5", BRIEF | COURSE)
    one.run("train")
    code = KILL_ONCE.format(marker=str(tmp_path / "killed"), step=KILLED_AT)
    (two.folder / "sitecustomize.py").write_text(code)
    output = two.run("train", PYTHONPATH=os.pathsep.join([str(two.folder), str(ROOT)]))
    assert "process 1 of 2 was ended by signal 9 (Killed): starting all again (1 of 3)" in output
    lost = KILLED_AT - 1 - (KILLED_AT - 1) // EVERY * EVERY
    assert f"Starting after step {KILLED_AT - 1 - lost}" in output and lost <= EVERY - 1
    assert two.newest().status().state == "done"
    assert [step for step, _ in losses(two)] == list(range(1, STEPS + 1))
    assert losses(two) == losses(one)
