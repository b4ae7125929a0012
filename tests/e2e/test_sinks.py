"""A run that goes on has one event file for TensorBoard, which tells what metrics.jsonl tells."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lib.runs import checkpoint, metrics
from tests.e2e.runner import TINY, Runner
from tests.support.event_files import INSTALLED, read_events

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not INSTALLED, reason="the package tensorboard is not installed")
def test_a_run_goes_on_with_its_events(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    settings = {
        "CONFIG_MAX_STEPS": "12",
        "CONFIG_CHECKPOINT_INTERVAL_STEPS": "4",
        "CONFIG_KEEP_BEST": "n",
        "CONFIG_EMA": "y",
        "CONFIG_LOG_INTERVAL_STEPS": "2",
    }
    runner.configure("lenet5", TINY | settings)
    output = runner.run("train")
    assert "Average of the weights: decay 0.99; it reaches back about 100.0 steps, 6,400 samples" in output
    run = runner.newest()
    assert not run.sinks.exists()
    # As if it had been killed after step 8; events are wanted only now.
    shutil.rmtree(run.checkpoints / "step-00000012")
    run.set_status("preempted", step=8)
    runner.configure("lenet5", TINY | settings | {"CONFIG_SINK_TENSORBOARD": "y"})
    output = runner.run("train")
    assert f"Resuming {run.path}" in output and "Starting after step 8" in output
    assert checkpoint.steps(run.checkpoints)[-1] == 12
    (file,) = run.sinks.iterdir()
    events = read_events(file)[2:]
    rows = metrics.read(run.metrics)
    assert [event.step for event in events] == [row["step"] for row in rows]
    assert [event.step for event in events if "train/loss" in event.values] == [2, 4, 6, 8, 10, 12]
    *rows, speed = rows
    assert speed["kind"] == "speed" and "speed/samples_per_second" in events.pop().values
    losses = [row["loss"] for row in rows]
    told = [event.values[f"{row['kind']}/loss"] for event, row in zip(events, rows, strict=True)]
    assert told == pytest.approx(losses, rel=1e-6)
