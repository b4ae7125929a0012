"""Runs that nobody listens to or that were tampered with: nobody is told that all is well."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lib.runs import metrics
from lib.runs.directory import RunDir, State
from tests.e2e.forked import Forked
from tests.e2e.runner import BRIEF, ROOT, SHORT, Runner

pytestmark = pytest.mark.slow


def test_a_run_that_nobody_listens_to_goes_on(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", SHORT)
    runner.run("plan")  # makes the data
    process = Forked(
        "tests.e2e.unheard",
        ["--runs", str(runner.runs), "train"],
        environment=runner.environment(),
        output=tmp_path / "errors",
    )
    said, _ = process.communicate(timeout=300)
    assert (process.returncode, said) == (
        0,
        "note: nobody reads standard output any more; the run continues\n",
    )
    run = runner.newest()
    assert run.status().state == "done" and "Done: " in run.log.read_text()
    steps = [row["step"] for row in metrics.read(run.metrics) if row["kind"] == "train"]
    assert {5, 10} <= {*steps} and steps == sorted(steps)


def test_a_run_whose_configuration_was_changed_is_refused_until_that_is_accepted(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", SHORT)
    runner.run("train")
    run = runner.newest()
    runner.run("eval")
    config, plan = run.config.read_text(), run.path / "plan.json"
    cut = config[: config.index("CONFIG_SEED=") + 8]  # within a line
    for damaged in (config[:300], config.replace("CONFIG_SEED=1", "CONFIG_SEED=2"), cut):
        run.config.write_text(damaged)
        set_state(run, "preempted")
        for command in ("eval", "rerun", "resume", "sample"):
            output = runner.run(command, status=2)
            assert "Traceback" not in output and output.count("\n") <= 8, output
            assert f"restore it: cp {run.minimal} {run.config}" in output
        assert run.status().step == 10 and len(list(runner.runs.glob("lenet5/*"))) == 1
        shutil.copy(run.minimal, run.config)
        assert "accuracy" in runner.run("eval")
    run.config.write_text(config.replace("CONFIG_MAX_STEPS=10", "CONFIG_MAX_STEPS=15"))
    output = runner.run("resume", status=2)
    assert f"{run.config} is not what the run was made with: MAX_STEPS 10 -> 15" in output
    (accept,) = re.findall(r"accept it as it is: (mv .*)", output)
    subprocess.run(accept, shell=True, check=True)
    assert "Starting after step 10" in runner.run("resume")
    accepted = runner.newest()
    assert accepted.read_json("values")["MAX_STEPS"] == 15 == accepted.status().step
    renamed = accepted.path.rename(accepted.path.with_name(f"{accepted.name[:-8]}00000000"))
    output = runner.run("eval", status=2)
    assert f"{renamed} is not called as its run was: the folder was renamed or moved; give it its" in output
    subprocess.run(output.partition("name again: ")[2], shell=True, check=True)
    assert "accuracy" in runner.run("eval") and accepted.path.is_dir()
    plan = accepted.path / "plan.json"
    plan.write_text(plan.read_text().replace('"micro_batch":', '"batch_per_device":'))
    output = runner.run("eval", status=1)
    assert "Traceback" not in output and f"the plan of {accepted.path} cannot be read" in output


def set_state(run: RunDir, state: State) -> None:
    """As if something had ended it."""
    status = run.status()
    run.set_status(state, step=status.step, reason="the test says so", **status.facts)


@pytest.mark.long
def test_another_model_in_the_tree_changes_no_identity(tmp_path: Path, tree: Path) -> None:
    runs, out, experiment = tmp_path / "runs", tmp_path / "sweep", tmp_path / "one.yaml"
    (ROOT / "data").mkdir(exist_ok=True)
    (tree / "data").symlink_to(ROOT / "data")  # generated once
    settings = {name.removeprefix("CONFIG_"): value for name, value in BRIEF.items()}
    lines = "".join(f"  {name}: {'true' if value == 'y' else value}\n" for name, value in settings.items())
    experiment.write_text(f"about: a trial\nconfig: lenet5\nseeds: [1]\nset:\n{lines}")
    overrides = [f"CONFIG_{name}={value}" for name, value in settings.items()]

    def call(*command: str) -> str:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python = sys.executable
    make = ["make", "VENV=", f"PYTHON={python}"]
    call(*make, "defconfig-lenet5")
    call(*make, "setconfig", f"SET={' '.join(overrides)}")
    train = [python, "-m", "train", "--runs", str(runs)]
    sweep = [python, "-m", "scripts.sweep", "--out", str(out), str(experiment)]
    call(*train, "train")
    call(*sweep)
    (run,) = (RunDir.open(path) for path in runs.glob("lenet5/*"))
    set_state(run, "preempted")
    call(*make, "new-model", "NAME=my_net", "TASK=classify")
    assert f"Resuming {run.path}" in (said := call(*train, "train")) and "after step 40" in said
    assert "already there" in call(*sweep)
    set_state(run, "preempted")
    shutil.rmtree(tree / "models/resnet50")
    assert f"Resuming {run.path}" in call(*train, "resume")
    assert "accuracy" in call(*train, "eval")
