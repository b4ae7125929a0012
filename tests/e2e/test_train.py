"""Whole runs of a second each: what they leave behind, and that nothing stops them from going on."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lib.runs import checkpoint, metrics
from tests.e2e.runner import (
    BRIEF,
    ROOT,
    SHORT,
    TINY,
    Runner,
    assert_same_bits,
    wait_for_checkpoint,
    wait_for_log,
)

pytestmark = pytest.mark.slow
KILLS = 20


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def shape_of(output: str) -> list[str]:
    """The lines of a run's output without what differs between runs and machines; equal ones once."""
    text = re.sub(r"\n {4,}", " ", output)
    text = re.sub(r"as (recommended|requested);", "as GIVEN;", text)
    text = re.sub(r"cpu: .*?, \d+ CPU", "cpu: NAME, # CPU", text)
    text = re.sub(r"^(Run:?) \S+", r"\1 PATH", text, flags=re.MULTILINE)
    return [*dict.fromkeys(re.sub(r"\b[\d.]+|\b(bf16|fp32)", "#", text).splitlines())]


def test_a_run_leaves_everything_behind(runner: Runner) -> None:
    runner.configure("lenet5", TINY)
    output = runner.run("train")
    (sample,) = re.findall(r"```text\n(Plan .*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    shown = shape_of(sample)
    assert [line for line in shape_of(output) if line in shown] == shown, "the sample is of this form"
    assert "Plan (" in output and "Hyperparams" not in output and "Done: " in output and "synthetic" in output
    run = runner.newest()
    assert run.status().state == "done" and run.status().step == 40
    logged = (run.path / "log.txt").read_text()
    assert "micro batch" in logged and "micro batch" not in output, "the log has the whole plan"
    assert output.index("Next:") > output.index(f"Run: {run.path}")
    stored = {path.name for path in run.path.iterdir()}
    assert {
        "config",
        "defconfig",
        "plan.json",
        "hardware.json",
        "env.json",
        "metrics.jsonl",
        "log.txt",
    } <= stored
    plan = json.loads((run.path / "plan.json").read_text())
    assert plan["effective_batch"] == 64 and plan["reasons"]["micro_batch"]
    rows = metrics.read(run.metrics)
    train_rows = [row for row in rows if row["kind"] == "train"]
    assert train_rows[-1]["step"] == 40 and train_rows[-1]["loss"] < train_rows[0]["loss"]
    assert [row["samples"] for row in rows if row["kind"] == "eval"][-1] == 4000
    assert "accuracy" in runner.run("eval", run.name)


def test_the_newest_and_the_best_checkpoint_can_be_evaluated(runner: Runner) -> None:
    settings = {"CONFIG_CHECKPOINT_INTERVAL_STEPS": "3", "CONFIG_KEEP_LAST": "2", "CONFIG_KEEP_BEST": "n"}
    runner.configure("lenet5", SHORT | settings)
    runner.run("train")
    run = runner.newest()
    assert checkpoint.steps(run.checkpoints) == [9, 10]
    (run.checkpoints / "best").write_text("step-00000009\n")
    assert f"{run.path}, step 10: " in runner.run("eval")
    assert f"{run.path}, step 9: " in runner.run("eval", "--best")


def test_an_interrupted_run_is_left_alone_where_that_is_asked_for(runner: Runner) -> None:
    runner.configure("lenet5", SHORT | {"CONFIG_MAX_STEPS": "5", "CONFIG_RESUME_NEVER": "y"})
    runner.run("train")
    first = runner.newest()
    first.set_status("preempted", step=5)
    assert "Resuming" not in runner.run("train")
    assert runner.newest().name != first.name and first.status().state == "preempted"


def test_the_same_configuration_trains_the_same_weights(runner: Runner) -> None:
    runner.configure("lenet5", SHORT)
    runner.run("train")
    first = runner.weights()
    runner.run("train")
    assert len(list(runner.runs.glob("*/*/status.json"))) == 2, "a run that is done is not gone on with"
    assert_same_bits(first, runner.weights())


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(runner: Runner, tmp_path: Path) -> None:
    settings = SHORT | {
        "CONFIG_MAX_STEPS": "90",
        "CONFIG_CHECKPOINT_INTERVAL_STEPS": "3",
        "CONFIG_EVAL_INTERVAL_STEPS": "30",
        "CONFIG_EMA": "y",
    }
    (tmp_path / "reference").mkdir()
    reference = Runner(tmp_path / "reference")
    reference.configure("lenet5", settings)
    reference.run("train")
    expected = reference.weights()
    runner.configure("lenet5", settings)
    started = time.monotonic()
    runner.run("train")  # the first of all took longer: it imported and made what others find
    seconds = time.monotonic() - started
    moments = random.Random(7)
    kills = 0
    while kills < KILLS:
        process = runner.start("train")
        try:
            output, _ = process.communicate(timeout=moments.uniform(0.3, 1.0) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0, output
        assert_same_bits(runner.weights(), expected)
    output = runner.run("train")
    assert_same_bits(runner.weights(), expected)
    steps = [row["step"] for row in metrics.read(runner.newest().metrics) if row["kind"] == "train"]
    assert steps == sorted(set(steps)), "rows of lost steps were kept"


def test_a_damaged_newest_checkpoint_costs_an_interval_and_is_told(runner: Runner) -> None:
    runner.configure("lenet5", SHORT | {"CONFIG_MAX_STEPS": "4000", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "10"})
    process = runner.start("train")
    wait_for_checkpoint(runner, process, count=2)
    process.kill()
    process.communicate()
    newest = sorted(runner.newest().checkpoints.glob("step-*"))[-1]
    data = bytearray((newest / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "state.pt").write_bytes(data)
    step = int(newest.name.removeprefix("step-"))
    process = runner.start("train")
    wait_for_log(runner, process, f"Starting after step {step - 10}")
    process.kill()
    output, _ = process.communicate()
    assert f"checkpoint {newest.name} is damaged" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_and_the_run_goes_on(runner: Runner, number: signal.Signals) -> None:
    runner.configure(
        "lenet5", SHORT | {"CONFIG_MAX_STEPS": "100000", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "20"}
    )
    process = runner.start("train")
    wait_for_checkpoint(runner, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    status = runner.newest().status()
    assert status.state == "preempted"
    assert status.reason.startswith(f"stopped by {number.name} after step {status.step}")
    assert "stopping after this step" in output
    named = re.findall(r"make resume RUN=(\S+) continues from there", output)
    assert named == [str(runner.newest().path)] and named[0] in status.reason
    process = runner.start("resume", named[0])
    wait_for_log(runner, process, f"Starting after step {status.step}")
    assert runner.newest().status().state == "running"
    process.kill()
    process.communicate()


def test_divergence_stops_with_a_message_and_keeps_the_last_good_checkpoint(runner: Runner) -> None:
    runner.configure(
        "lenet5",
        SHORT
        | {
            "CONFIG_OPTIMIZER_SGD": "y",
            "CONFIG_LEARNING_RATE": "100",
            "CONFIG_SCHEDULE_ONE_CYCLE": "y",
            "CONFIG_MAX_STEPS": "400",
            "CONFIG_CHECKPOINT_INTERVAL_STEPS": "1",
            "CONFIG_WARMUP_PCT": "90",
        },
    )
    output = runner.run("train", status=1)
    assert "training has diverged" in output and "Traceback" not in output
    run = runner.newest()
    assert run.status().state == "failed"
    assert all(tensor.isfinite().all() for tensor in runner.weights().values())


def test_a_run_on_two_processes_is_the_run_on_one(tmp_path: Path) -> None:
    # A large epsilon: Adam would make a large step of the last bit of a gradient that is almost zero.
    settings = SHORT | {"CONFIG_DEVICE_CPU": "y", "CONFIG_ADAM_EPS": "0.001"}
    (tmp_path / "one").mkdir()
    one = Runner(tmp_path / "one")
    one.configure("lenet5", settings)
    one.run("train")
    runner = Runner(tmp_path, forks=True)
    runner.configure("lenet5", settings | {"CONFIG_NUM_DEVICES": "2"})
    output = runner.run("train")
    assert output.count("Done: ") == 1, "only rank 0 prints"
    assert len(list(runner.runs.glob("*/*/status.json"))) == 1
    for name, tensor in runner.weights().items():
        difference = (tensor - one.weights()[name]).abs().max()
        assert difference <= 1e-5 * tensor.abs().max().clamp(min=1), name


def test_a_plan_is_kept_on_the_same_machine_and_made_anew_on_another(tmp_path: Path) -> None:
    runner = Runner(tmp_path, forks=True)
    steps = {"CONFIG_MAX_STEPS": "4000", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "10"}
    settings = BRIEF | steps | {"CONFIG_DEVICE_CPU": "y"}
    runner.configure("lenet5", settings)
    process = runner.start("train")
    wait_for_checkpoint(runner, process)
    process.kill()
    process.communicate()
    run = runner.newest()

    def resumed(name: str, changes: dict[str, Any], *, command: str = "resume") -> str:
        run.write(name, run.read_json(name) | changes)
        process = runner.start(command)
        wait_for_log(runner, process, "Starting after step")
        process.kill()
        (run.path / "log.txt").write_text("")
        return process.communicate()[0]

    code = run.read_json("plugins")
    run.write("plugins", code | {"model": {"sha256": "other code"}})
    output = resumed("plan", {"micro_batch": 16, "accumulation": 4, "last_micro_batch": 16})
    assert "made for this machine" in output and "Hyperparams" not in output
    assert run.read_json("plan")["micro_batch"] == 16
    assert "NOTE: the code of its model was changed after the run began" in output
    assert run.read_json("plugins") == code | {"model": code["model"] | {"former": ["other code"]}}
    devices = run.read_json("hardware")["devices"]
    for changes in (
        {"cpu_name": "another"},
        {"devices": [device | {"name": "another"} for device in devices]},
    ):
        output = resumed("hardware", changes)
        assert "made for this machine" not in output and "Plan (" in output
        assert "another" not in json.dumps(run.read_json("hardware"))
        assert run.read_json("plan")["micro_batch"] == 64
    # It goes on on another number of devices, but not with another number of samples.
    plan = run.read_json("plan")
    two = {"world": 2, "strategy": "ddp", "micro_batch": 16, "last_micro_batch": 16, "effective_batch": 32}
    run.write("plan", plan | two)
    told = runner.run("resume", status=2)
    assert "trained with 32 samples a step, and now it would be 64" in told
    assert "make train CONFIG_RESUME_NEVER=y" in told
    runner.configure("lenet5", settings | {"CONFIG_NUM_DEVICES": "2"})
    output = resumed("plan", plan, command="train")
    assert f"Resuming {run.path}" in output and "made for this machine" not in output
    assert (run.read_json("plan")["world"], run.read_json("plan")["micro_batch"]) == (2, 32)
    assert run.read_json("values")["NUM_DEVICES"] == 2, "make resume goes on with those"
    assert "CONFIG_NUM_DEVICES=2" in run.config.read_text()
    assert len(list(runner.runs.glob("*/*/status.json"))) == 1


def test_the_same_configuration_twice_at_once_is_told(runner: Runner) -> None:
    runner.configure(
        "lenet5", SHORT | {"CONFIG_MAX_STEPS": "100000", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "20"}
    )
    process = runner.start("train")
    wait_for_checkpoint(runner, process)
    try:
        run = runner.newest()
        output = runner.run("resume", run.name, status=1)
        assert f"is in use: process {process.pid} on " in output
        second = runner.start("train")
        while len(list(runner.runs.glob("*/*/status.json"))) < 2:
            assert second.poll() is None, second.communicate()[0]
            time.sleep(0.01)
        second.kill()
        output, _ = second.communicate()
        assert f"{run.path} has the same configuration and is in use by process {process.pid}" in output
    finally:
        process.kill()
        process.communicate()


def test_an_unwritable_directory_of_runs_is_one_line(runner: Runner) -> None:
    runner.configure("lenet5", SHORT)
    runner.runs.write_text("in the way")
    output = runner.run("train", status=1)
    assert "error: cannot create a run directory" in output and "Traceback" not in output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_one_line_and_loses_nothing(runner: Runner) -> None:
    runner.runs.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(runner.runs)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        runner.configure(
            "lenet5",
            SHORT
            | {"CONFIG_MAX_STEPS": "40", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "5", "CONFIG_KEEP_LAST": "1000"},
        )
        output = runner.run("train", status=1)
        assert "No space left on device" in output and "Traceback" not in output
        kept = sorted(path.name for path in runner.newest().checkpoints.glob("step-*"))
        assert kept and runner.weights()
    finally:
        subprocess.run(["umount", str(runner.runs)], check=True)


def test_missing_configuration_names_the_ways_to_one(runner: Runner) -> None:
    output = runner.run("train", status=2)
    assert "make defconfig-" in output and "make menuconfig" in output and "Traceback" not in output
    assert not (ROOT / ".config-none").exists()


def test_a_terminal_without_our_signs_and_a_run_that_is_removed(runner: Runner) -> None:
    runner.configure(
        "lenet5", SHORT | {"CONFIG_MAX_STEPS": "100000", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "200"}
    )
    process = runner.start("train", PYTHONIOENCODING="ascii")
    wait_for_checkpoint(runner, process)
    run = runner.newest()
    shutil.rmtree(run.path, ignore_errors=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in output, output
    # Which of its files is missed first depends on where the removal overtook the run.
    assert str(run.path) in output
    assert "it was removed while this run trained in it" in output or "error: cannot" in output
    shutil.rmtree(run.path, ignore_errors=True)
    (run.path / "ckpt").mkdir(parents=True)
    runner.configure("lenet5", SHORT)
    assert "Done: " in runner.run("train"), "what is left of a removed run is no run"
