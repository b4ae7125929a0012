"""The report of a sweep: its page and its text say the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lib.errors import ToolkitError
from lib.reports.page import as_text, section, table
from lib.scaling.experiments import ROOT, ScalingExperiments
from lib.scaling.judge import judge
from lib.scaling.results import ScalingResults, points_of
from lib.scaling.sweep_report import sections
from tests.lib.reports.test_page import Elements
from tests.lib.scaling.test_sweep import result, sweep_of
from tests.support.reported import all_findings, reported_run
from train import report as reports

TEXT = SimpleNamespace(
    sha256="x", ngram_nats=(3.0,), entropy_rate=None, dataset=SimpleNamespace(source="a text")
)


def results_of(floor: float) -> list[ScalingResults]:
    """Losses by the first law for 20,000 tokens, and above `floor` for fewer."""
    sizes, amounts = (32, 64, 128, 256), (5_000, 20_000)
    return [
        dataclasses.replace(result(width), tokens=tokens, val_nats=5 * width**-0.2 + floor * (tokens < 9000))
        for width, tokens in itertools.product(sizes, amounts)
    ]


@pytest.mark.slow
def test_losses_and_laws_are_drawn_by_size() -> None:
    results = results_of(floor=1.0)
    verdict = judge(points_of(results), starts=8, samples=8)
    runs, own = sections(results, {"resnet_bk": verdict}, "a text", {"counting 1-grams": 1.0})
    assert runs.title == "Runs of the sweep" and len(runs.blocks[0]["rows"]) == len(results)
    chart, laws = own.blocks
    drawn = {line["name"]: line for line in chart["lines"]}
    measured, law = drawn["20,000 tokens"], drawn["L = A N^-alpha, at the most data"]
    assert measured["x"] == [width**2 for width in (32, 64, 128, 256)]
    for end in (0, -1):
        assert law["value"][end] == pytest.approx(measured["value"][end], rel=1e-3)
    assert "L = E + A N^-alpha, at the most data (insufficient)" in drawn
    assert drawn["5,000 tokens"]["value"][0] == pytest.approx(measured["value"][0] + 1)
    found = [*map(tuple, laws["rows"])]
    assert any(name == "L = A N^-alpha, at the most data" and " alpha 0." in text for name, text in found)
    assert ("L = E + A N^-alpha + B D^-beta", "insufficient: 8 points, and 12 are needed") in [
        (name, text.partition(";")[0]) for name, text in found
    ]
    text = as_text([runs, own])
    assert all(note in text for note in own.notes) and all(finding in text for _, finding in found)


def test_a_table_is_aligned_in_text() -> None:
    assert as_text([section("One", "a note", table("T", ("head", "b"), [("x", "1")]))]) == (
        "One\n  a note\n\nhead  b\nx     1\n"
    )


def test_the_folder_of_a_sweep_has_a_report_and_so_have_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ScalingExperiments, "corpus", TEXT)
    sweep_of(tmp_path, result(config_hash="a"))
    run = reported_run(tmp_path / "runs" / "d64_l4-a")
    monkeypatch.setattr(reports, "stored_findings", lambda _: all_findings())
    for folder in (tmp_path, run.path):
        assert reports.report(str(folder), root=ROOT, runs=tmp_path, out=None) == 0
        assert capsys.readouterr().out == f"Report: {folder / 'report.html'}\n"
        page = (folder / "report.html").read_text()
        assert "resnet_bk: not resolved: " in page and "insufficient: 1 points, and 12 are needed" in page
        titles = [chart["title"] for chart in json.loads(Elements(page).scripts[0])["charts"]]
        assert titles[-1] == "Loss by size, in nats"
    (tmp_path / "d64_l4_results.json").unlink()
    with pytest.raises(ToolkitError, match="1 of 1 runs are missing"):
        reports.report(str(tmp_path), root=ROOT, runs=tmp_path, out=None)
    assert reports.report(str(run.path), root=ROOT, runs=tmp_path, out=None) == 0
    assert "are not shown: 1 of 1 runs are missing" in run.report.read_text()


def test_another_corpus_is_that_of_the_sweep(tmp_path: Path) -> None:
    other = dataclasses.replace(result(config_hash="a"), config={"corpus": "pysource", "data_sha256": "x"})
    sweep_of(tmp_path, other)
    assert ScalingExperiments.of_sweep(tmp_path).results() == [other]
