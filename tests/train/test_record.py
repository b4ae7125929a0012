"""What a run leaves in its directory and says on the terminal."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.errors import ToolkitError
from lib.plan.types import Plan
from lib.runs import checkpoint, metrics
from lib.runs.console import Console
from lib.runs.directory import RunDir
from tests.support.training import small_plan
from train.record import Record, RunRecord, format_evaluation

TRAIN_ROW = {"step": 4, "epoch": 0.5, "loss": 1.5, "accuracy": 0.25, "samples_per_second": 100.0}
TRAIN_ROW |= {"seconds": 2.0, "data_wait": 0.5}
EVAL_ROW = {"step": 4, "epoch": 0.5, "samples": 10.0, "loss": 1.25, "accuracy": 0.5}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, model="lenet5", identity="0123abcd", files={"config": "CONFIG_X=y\n"})


@pytest.fixture
def record(run: RunDir) -> Iterator[RunRecord]:
    with closing(RunRecord(run, Console(run.log), started=100.0, keep_last=2)) as begun:
        begun.begin(0, 10)
        yield begun


def rows_of(run: RunDir) -> list[dict[str, Any]]:
    return metrics.read(run.metrics)


def test_rows_are_kept_with_their_kind_and_evaluations_are_told(
    run: RunDir, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    record.row("train", **TRAIN_ROW)
    assert rows_of(run) == [], "a row of training is not worth a write of its own"
    record.row("eval", **EVAL_ROW)
    assert rows_of(run) == [{"kind": "train", **TRAIN_ROW}, {"kind": "eval", **EVAL_ROW}]
    assert "step 4, epoch 0.50: loss 1.2500, accuracy 0.5000 over 10 samples" in capsys.readouterr().out
    record.row("train", **TRAIN_ROW | {"step": 5})
    record.close()
    assert [row["step"] for row in rows_of(run)] == [4, 4, 5]


def test_rows_of_training_are_written_after_ten_seconds(
    run: RunDir, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For make watch, which reads the file of a run that may not evaluate for hours."""
    now = time.monotonic()
    for number, (seconds, written) in enumerate([(0, 0), (9, 0), (11, 3), (12, 3), (19, 3), (22, 6)]):
        monkeypatch.setattr("train.record.time.monotonic", lambda at=now + seconds: at)
        record.row("train", **TRAIN_ROW | {"step": number})
        assert len(rows_of(run)) == written, seconds


def test_rows_of_steps_that_are_made_again_are_forgotten(run: RunDir, record: RunRecord) -> None:
    for step in (1, 2, 3):
        record.row("train", **TRAIN_ROW | {"step": step})
    record.close()
    again = RunRecord(run, Console(run.log), started=0.0, keep_last=1)
    again.begin(2, None)
    again.row("train", **TRAIN_ROW | {"step": 3, "loss": 9.0})
    again.close()
    assert [(row["step"], row["loss"]) for row in rows_of(run)] == [(1, 1.5), (2, 1.5), (3, 9.0)]


def test_a_checkpoint_is_kept_with_the_rows_up_to_it(run: RunDir, record: RunRecord) -> None:
    record.row("train", **TRAIN_ROW)
    record.flush()
    assert len(rows_of(run)) == 1
    for step in (4, 6, 8, 10):
        record.save(step, {"weight": torch.ones(2)}, best=step == 4)
    assert checkpoint.steps(run.checkpoints) == [4, 8, 10], "two, and the best"
    found = checkpoint.load(run.checkpoints, which="best", log=print)
    assert found is not None and found[0] == 4 and torch.equal(found[1]["weight"], torch.ones(2))
    assert (run.status().state, run.status().step) == ("running", 10)


def test_a_run_that_was_removed_is_told_and_not_begun_again(run: RunDir, record: RunRecord) -> None:
    shutil.rmtree(run.path)
    with pytest.raises(ToolkitError, match=f"{run.path} is gone: it was removed while"):
        record.save(4, {}, best=False)
    assert not run.path.exists()


def test_a_changed_plan_is_told_and_stored(
    run: RunDir, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = small_plan(4, 4, 4)
    record.replan(plan, "continuing with 4")
    assert Plan.from_json(json.loads((run.path / "plan.json").read_text())) == plan
    assert "continuing with 4" in capsys.readouterr().out
    assert "continuing with 4" in run.log.read_text()


def test_the_time_to_the_first_step_is_told_once(
    record: RunRecord, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.record.time.monotonic", lambda: 102.5)
    for step in (7, 8):
        record.progress(step, step / 10)
    record.close()
    assert capsys.readouterr().out.count("First optimizer step 2.5 s after the start") == 1


def test_a_finished_run_is_done_and_says_what_came_out(
    run: RunDir, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    record.finish(10, seconds=12.34, result={"samples": 10.0, "accuracy": 0.5}, part="test part of digits")
    output = capsys.readouterr().out
    assert "Done: accuracy 0.5000 over 10 samples (test part of digits), 12.3 s of training" in output
    assert f"Run: {run.path}" in output
    status = run.status()
    assert (status.state, status.step) == ("done", 10)
    facts = {"seconds": 12.34, "part": "test part of digits", "samples": 10.0, "accuracy": 0.5}
    assert status.facts == facts


def test_a_run_is_done_even_if_nobody_can_be_told(
    run: RunDir, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def log(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "log", log)
    with pytest.raises(KeyboardInterrupt):
        record.finish(10, seconds=1.0, result={"samples": 10.0}, part="test part")
    assert run.status().state == "done"


def test_what_cannot_be_reported_fails_no_finished_run(
    run: RunDir, record: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = list[str]()

    def estimate() -> None:
        seen.append(run.status().state)
        raise ZeroDivisionError("no rate")

    reports = estimate, lambda: seen.append("after it")
    record.finish(10, seconds=1.0, result={"samples": 10.0}, part="test part", reports=reports)
    assert seen == ["done", "after it"] and run.status().state == "done"
    output = capsys.readouterr().out
    assert output.index("A part of the summary is missing: ZeroDivisionError: no rate") < output.index(
        "Done:"
    )
    Record().finish(1, seconds=1.0, result={}, part="", reports=reports)
    assert len(seen) == 4, "on other ranks, too: a report may be collective"


def test_other_ranks_neither_print_nor_write(capsys: pytest.CaptureFixture[str]) -> None:
    silent: Record = Record()
    silent.begin(0, None)
    silent.log("hello")
    silent.row("train", **TRAIN_ROW)
    silent.progress(1, 0.5)
    silent.flush()
    silent.save(1, {}, best=True)
    silent.replan(small_plan(4), "why")
    silent.finish(1, seconds=1.0, result={}, part="")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_an_evaluation_in_words() -> None:
    assert format_evaluation(EVAL_ROW) == "loss 1.2500, accuracy 0.5000 over 10 samples"
