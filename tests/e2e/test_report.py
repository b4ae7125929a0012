"""make report on real runs: what it shows of their checkpoints, once, and what it says without them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lib.runs import metrics
from lib.runs.directory import RunDir
from tests.e2e.runner import TINY, Runner
from tests.e2e.test_language import a_runner
from tests.lib.reports.test_page import Elements

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = Runner(tmp_path_factory.mktemp("report"))
    settings = {"CONFIG_MAX_STEPS": "20", "CONFIG_CHECKPOINT_INTERVAL_STEPS": "10", "CONFIG_KEEP_LAST": "2"}
    runner.configure("lenet5", TINY | settings)
    runner.run("train")
    return runner


def copy_of(runner: Runner, folder: Path) -> tuple[RunDir, Runner]:
    shutil.copytree(runner.folder, folder, dirs_exist_ok=True)
    return Runner(folder).newest(), Runner(folder)


def charts_of(page: str) -> dict[str, Any]:
    return {chart["title"]: chart for chart in json.loads(Elements(page).scripts[0])["charts"]}


def test_a_report_shows_the_run_and_its_model(runner: Runner, tmp_path: Path) -> None:
    run, own = copy_of(runner, tmp_path)
    printed = own.run("report")
    assert f"Report: {run.report}" in printed
    assert "Newest run: lenet5 on digits (synthetic), done, began " in printed
    assert "Newest run" not in own.run("report", run.name)
    page = run.report.read_text()
    charts = charts_of(page)
    losses = {row["step"]: row["loss"] for row in metrics.read(run.metrics) if row["kind"] == "train"}
    training, evaluation = charts["loss"]["lines"]
    assert dict(zip(training["step"], training["value"], strict=True)) == pytest.approx(losses)
    assert (training["name"], evaluation["name"]) == ("training", "evaluation")
    for text in ("By the checkpoint of step 20.", "Confusion matrix", "Worst samples", "loss 2.3026"):
        assert text in page, text
    traced = charts["Predicted memory over two steps and an evaluation batch, in MB"]["lines"][0]
    predicted = sum(run.read_json("plan")["memory"]["parts"].values())
    assert max(traced["value"]) * 1e6 == pytest.approx(predicted, rel=0.02)
    assert page.count("data:image/png;base64,") == 24


def test_what_was_found_is_used_again(runner: Runner, tmp_path: Path) -> None:
    run, own = copy_of(runner, tmp_path)
    own.run("report")
    content = json.loads(run.findings.read_text())
    content["exhibits"] = [{"kind": "text", "title": "stored", "note": "", "text": "from the file"}]
    run.findings.write_text(json.dumps(content))
    out = tmp_path / "elsewhere.html"
    own.run("report", "--out", str(out))
    assert "from the file" in out.read_text()
    content["steps"] = [10]
    run.findings.write_text(json.dumps(content))
    own.run("report", "--out", str(out))
    assert "from the file" not in out.read_text() and "Confusion matrix" in out.read_text()


@pytest.mark.parametrize("is_damaged", [False, True], ids=["missing", "damaged"])
def test_without_a_checkpoint_the_report_says_why(runner: Runner, tmp_path: Path, is_damaged: bool) -> None:
    run, own = copy_of(runner, tmp_path)
    if is_damaged:
        for state in run.checkpoints.glob("*/state.pt"):
            state.write_bytes(b"damaged")
    else:
        (run.checkpoints / "best").unlink()
        assert "leave out BEST=1: the latest is of step" in own.run("eval", "--best", status=1)
        shutil.rmtree(run.checkpoints)
        assert "has no checkpoint; name another run by RUN=" in own.run("eval", status=1)
    own.run("report")
    page = run.report.read_text()
    assert "Confusion matrix" not in page and not run.findings.exists()
    why = "no valid checkpoint" if is_damaged else "has no checkpoint"
    assert "The model is not shown: " in page and why in page
    assert "loss" in charts_of(page), "the rest is there"


def test_advice_on_damaged_checkpoints_destroys_nothing(runner: Runner, tmp_path: Path) -> None:
    """Where another one is valid it is named, and nothing is removed for a command that only reads."""
    run, own = copy_of(runner, tmp_path)
    (run.checkpoints / "best").write_text("step-00000010\n")
    best, latest = (run.checkpoints / f"step-000000{step}" / "state.pt" for step in (10, 20))
    best.write_bytes(best.read_bytes()[:100])
    said = own.run("eval", "--best", status=1).splitlines()
    assert said[-1] == (
        f"error: no valid best checkpoint in {run.checkpoints}: damaged: step-00000010; "
        "leave out BEST=1: the latest valid one is of step 20"
    )
    own.run("eval")
    latest.write_bytes(latest.read_bytes()[:100])
    export = ["export", "--format=pt2", f"--directory={tmp_path / 'exported'}"]
    advice = "; train again, or name another run by RUN= (make runs lists them)"
    for command in (["eval"], ["eval", "--best"], export):
        assert own.run(*command, status=1).splitlines()[-1].endswith(advice)
    run.set_status("preempted", step=20)
    assert own.run("resume", status=1).splitlines()[-1] == (
        f"error: no valid checkpoint in {run.checkpoints}: damaged: step-00000020, step-00000010; "
        "remove that directory to start again"
    )


def test_a_language_model_writes_at_each_checkpoint(tmp_path: Path) -> None:
    settings = {"CONFIG_CHECKPOINT_INTERVAL_STEPS": "10", "CONFIG_KEEP_LAST": "3"}
    runner = a_runner(tmp_path / "text", settings)
    runner.run("train")
    run = runner.newest()
    damaged = run.checkpoints / "step-00000020" / "state.pt"
    damaged.write_bytes(b"damaged")
    assert "The report leaves out step 20" in runner.run("report")
    page = run.report.read_text()
    assert [f"Text after step {step}" in page for step in (10, 20, 30)] == [True, False, True]
    texts = [block["text"] for block in json.loads(run.findings.read_text())["exhibits"]]
    assert len(set(texts)) == 2 and texts[0][:16] == texts[1][:16], "the same prompt"
    assert "bits per byte by counting 1- to 4-grams" in page
