"""The report of a run: each file of its directory is in it, and none has to be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ToolkitError
from lib.reports.page import Section
from lib.reports.run_report import (
    Findings,
    facts,
    run_note,
    sections,
    store_findings,
    stored_findings,
    write_report,
)
from lib.reports.series import MOST_POINTS
from lib.runs.directory import RunDir
from tests.lib.reports.test_page import Elements
from tests.support.reported import all_findings, reported_run, write_rows

MOST_BYTES = 3_000_000
UNREAD = {"problem": "the run has no checkpoint"}


def by_title(run: RunDir, findings: Findings = UNREAD) -> dict[str, Section]:
    return {section.title: section for section in sections(run, findings)}


def rows_of(section: Section, title: str) -> dict[str, tuple[str, ...]]:
    (found,) = [block for block in section.blocks if block["title"] == title]
    return {row[0]: tuple(row[1:]) for row in found["rows"]}


def test_the_result_comes_first_with_best_values_and_baselines(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    rows = [
        {"kind": "eval", "step": step, "accuracy": accuracy, "loss": loss}
        for step, accuracy, loss in ((10, 0.5, 1.0), (20, 0.8, 0.5), (30, 0.7, 0.6))
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = sections(run, all_findings())[0]
    assert first.title == "Result" and "test part of digits, synthetic" in first.notes[0]
    assert rows_of(first, "Evaluations") == {"accuracy": ("0.7", "0.8", "20"), "loss": ("0.6", "0.5", "20")}
    assert rows_of(first, "Baselines") == {"uniform guess": ("training loss 2.3026",)}


def test_metrics_of_a_finished_run_that_are_no_text_are_named(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    run.metrics.write_bytes(b"\xff\xfe\xfd")
    run.set_status("running", step=3)
    assert "There is no evaluation yet." in by_title(run)["Result"].notes
    run.set_status("done", step=3)
    with pytest.raises(ToolkitError, match=r"metrics.jsonl:1 is not a JSON object"):
        sections(run, UNREAD)


def test_a_baseline_is_also_read_from_the_log(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    run.log.write_text("2026-01-01T00:00:00Z N-gram baseline: 4.1 / 3.2 bits per byte\n")
    result = by_title(run)["Result"]
    assert rows_of(result, "Baselines") == {"N-gram baseline": ("4.1 / 3.2 bits per byte",)}


@pytest.mark.parametrize("name", ["N-gram", "Constant"])
def test_each_kind_of_baseline_is_found(name: str, tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    run.log.write_text(f"2026-01-01T00:00:00Z {name} baseline: r2 0\n")
    assert rows_of(by_title(run)["Result"], "Baselines") == {f"{name} baseline": ("r2 0",)}


def test_why_no_baseline_is_known_follows_from_what_was_read(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    read = by_title(run, all_findings(naive_loss=None))["Result"]
    assert any(note.endswith("none, and its task has no loss of a uniform guess.") for note in read.notes)
    unread = by_title(run)["Result"]
    assert any(note.endswith("none, and no checkpoint was read.") for note in unread.notes)


@pytest.mark.parametrize(
    ("seconds", "ago"), [(0, "1 s"), (90, "1.5 minutes"), (7200, "2 hours"), (864000, "10 days")]
)
def test_a_note_names_model_data_state_and_age(
    seconds: int, ago: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = reported_run(tmp_path)
    monkeypatch.setattr("time.time", lambda: run.began + seconds)
    assert run_note(run) == f"lenet5 on digits (synthetic), done, began {ago} ago"


def test_plan_memory_and_throughput(tmp_path: Path) -> None:
    found = by_title(reported_run(tmp_path), all_findings())
    assert rows_of(found["Plan"], "Decisions")["micro batch"] == ("32", "a reason")
    memory = found["Memory"]
    peak = rows_of(memory, "Peak")
    assert peak["activations"] == ("3.00 GB",) and peak["peak of tensors, predicted"] == ("3.10 GB",)
    assert peak["all of these, predicted"] == ("3.20 GB",)
    assert peak["peak, measured"] == ("3.30 GB",) and peak["measured / predicted peak"] == ("1.06",)
    assert "Measured by rank 0 whenever it logs: tensors, by the device's allocator." in memory.notes
    over_run, over_step = memory.blocks[1:]
    drawn = {line["name"]: (line["x"], line["value"]) for line in over_run["lines"]}
    assert drawn["predicted peak"] == ([1, 60], [3100.0, 3100.0])
    steps, sizes = drawn["measured so far"]
    assert steps[:3] == [1, 2, 3] and sizes[:3] == [3200, 3300, 3300]
    assert [line["name"] for line in over_step["lines"]] == ["model", "measured peak"]
    assert over_step["lines"][1]["value"] == [3300.0, 3300.0]
    assert not [block for block in found["Curves"].blocks if "peak" in block["title"]]
    speed = rows_of(found["Throughput"], "Speed")
    assert speed["samples per second"] == ("903",) and speed["time of an optimizer step"] == ("70.9 ms",)
    assert any("The end of a run adds" in note for note in found["Throughput"].notes)


def test_the_speed_that_a_run_has_recorded_is_shown(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    assert not any(name.startswith("whole run") for name in rows_of(by_title(run)["Throughput"], "Speed"))
    speed = {"kind": "speed", "step": 60, "samples_per_second": 1250.0, "data_wait": 0.031}
    speed |= {"least_samples_per_second": 900.0, "model_flop_utilization": 0.374}
    with run.metrics.open("a") as file:
        file.write(json.dumps(speed) + "\n")
    found = rows_of(by_title(run)["Throughput"], "Speed")
    assert found["whole run: samples per second"] == ("1,250",)
    assert found["whole run: data wait"] == ("3.1%",)
    assert found["whole run: model flop utilization"] == ("37.4%",)
    assert found["whole run: least samples per second"] == ("900",)


def test_requested_options_come_before_defaults(tmp_path: Path) -> None:
    section = by_title(reported_run(tmp_path))["Configuration"]
    assert rows_of(section, "Requested") == {"CONFIG_LEARNING_RATE": ("0.1", "command line")}
    assert rows_of(section, "Defaults") == {"CONFIG_EMA": ("n", "default"), "CONFIG_SEED": ("1", "default")}


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, model="lenet5", identity="00000001", files={"config": ""})
    run.release()
    found = by_title(run)
    assert "There is no evaluation yet." in found["Result"].notes
    assert "plan.json" in found["Plan"].notes[0]
    assert "no prediction" in found["Memory"].notes[0] and "Not measured" in found["Memory"].notes[1]
    assert found["Throughput"].notes == ["No throughput is recorded yet."]
    assert found["Model"].notes == ["The model is not shown: the run has no checkpoint"]
    write_report(run, UNREAD, tmp_path / "page.html")
    assert "The model is not shown" in (tmp_path / "page.html").read_text()


def test_every_exhibit_is_shown(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    write_report(run, all_findings(), run.report)
    page = run.report.read_text()
    for text in ("Confusion matrix", "data:image/png;base64,", "once upon\na time", "after step 1", "zeros"):
        assert text in page, text
    charts = json.loads(Elements(page).scripts[0])["charts"]
    assert page.count('<svg id="chart-') == len(charts)
    assert list(charts[0]["axes"]) == ["step", "seconds"], "the script draws over the first"


def test_findings_hold_for_the_checkpoints_of_then(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    assert stored_findings(run) is None
    store_findings(run, all_findings())
    assert stored_findings(run) == all_findings()
    (run.checkpoints / "step-00000060").mkdir(parents=True)
    assert stored_findings(run) is None, "there is a later checkpoint"
    store_findings(run, all_findings(steps=[60]))
    assert stored_findings(run) == all_findings(steps=[60])
    for damaged in ("", "[]", "{}", run.findings.read_text().replace('"version": 3', '"version": 0')):
        run.findings.write_text(damaged)
        assert stored_findings(run) is None, damaged


@pytest.mark.parametrize(
    "change",
    [
        {"exhibits": [{"kind": "matrix", "title": "Confusion matrix"}]},
        {"exhibits": [{"title": "a block without a kind"}]},
        {"exhibits": 5},
        {"memory": {"kind": "chart", "title": "Memory"}},
    ],
)
def test_damaged_findings_are_made_again(tmp_path: Path, change: dict[str, Any]) -> None:
    run = reported_run(tmp_path)
    store_findings(run, all_findings(**change))
    assert stored_findings(run) is None


def test_facts_are_words_and_only_those_that_are_known() -> None:
    content = {"free_bytes": 70 * 10**9, "dirty": True, "capability": None, "names": ["a", "b"], "count": 1}
    content |= {"odd_bytes": "x", "mean": [1 / 3, 2.0], "values": [], "unit": ""}
    content |= {"columns": [{"name": "size", "std": 2 / 3}]}
    assert facts(content) == [
        ("free", "70.00 GB"),
        ("dirty", "yes"),
        ("names", "a, b"),
        ("count", "1"),
        ("odd", "x"),
        ("mean", "0.333333, 2"),
        ("columns 0 name", "size"),
        ("columns 0 std", "0.666667"),
    ]


def test_many_facts_are_shown_on_request(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    run.write("data", {"name": "tabular", "columns": [{"name": f"c{number}"} for number in range(30)]})
    blocks = by_title(run)["Environment"].blocks
    assert {block["title"]: block["folded"] for block in blocks} == {
        "Software": False,
        "Hardware": False,
        "Data": True,
    }


def test_a_run_that_no_process_trains_was_killed(tmp_path: Path) -> None:
    (run := reported_run(tmp_path)).set_status("running", step=9)
    for change, state in ((run.lock, "running"), (run.release, "killed")):
        change()
        write_report(run, UNREAD, tmp_path / "page.html")
        assert f"{state} · step 9" in (tmp_path / "page.html").read_text()
        assert f", {state}, began" in run_note(run)


def test_the_head_says_when_the_run_began_and_how_long_it_trained(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    run.set_status("done", step=60, seconds=127.7)
    write_report(run, UNREAD, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    began = f"{run.name[:4]}-{run.name[4:6]}-{run.name[6:8]} {run.name[9:11]}:{run.name[11:13]} UTC"
    assert f"done · step 60 · began {began} · 2.13 minutes of training" in page


def test_a_page_is_not_written_over_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=f"cannot write {tmp_path}: Is a directory"):
        write_report(reported_run(tmp_path / "runs"), all_findings(), tmp_path)


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", "</script><b>"])
def test_what_a_run_holds_is_no_markup(tmp_path: Path, evil: str) -> None:
    run = reported_run(tmp_path, NAME=evil)
    run.write("data", {"name": evil})
    run.write("env", {evil: evil})
    run.set_status("failed", step=1, reason=evil)
    run.metrics.write_text(json.dumps({"kind": "eval", "step": 1, evil: 1.0}) + "\n")
    write_report(run, all_findings(), run.report)
    page = Elements(run.report.read_text())
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "b" not in [tag for tag, _ in page.tags]
    assert any(evil in text for text in page.texts)
    assert json.loads(page.scripts[0])["charts"][0]["lines"][0]["column"] == evil


@pytest.mark.slow
def test_a_run_of_100000_rows_is_small_and_its_series_can_be_read_back(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    rows = write_rows(run, 100_000, every=10)
    write_report(run, all_findings(), run.report)
    assert run.report.stat().st_size <= MOST_BYTES
    charts: list[dict[str, Any]] = json.loads(Elements(run.report.read_text()).scripts[0])["charts"]
    (loss,) = [chart for chart in charts if chart["title"] == "loss"]
    (line,) = loss["lines"]
    losses = [float(f"{row['loss']:.7g}") for row in rows if row["kind"] == "train"]
    assert line["rows"] == len(losses) and len(line["value"]) <= MOST_POINTS
    assert line["value"] == [losses[step - 1] for step in line["step"]], "the extremes: test_series"
