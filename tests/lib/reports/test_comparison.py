"""Comparison of runs: what differs, and curves over steps, samples, time and compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.errors import ToolkitError
from lib.plan.types import fixed_plan
from lib.reports.comparison import configuration_differences, overlaid, plan_differences, sections
from lib.reports.exhibits import Table
from lib.reports.page import render
from lib.reports.run_report import store_findings
from lib.runs.directory import RunDir
from tests.support.reported import all_findings, reported_run, write_rows

NAMES = ("one", "two")


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDir]:
    one, two = reported_run(tmp_path, 1), reported_run(tmp_path, 2, EMA=True, EMA_DECAY=0.9)
    two.write("plan", fixed_plan("another reason", micro_batch=16, accumulation=4, device="cuda").to_json())
    return [one, two]


def test_only_what_differs_is_listed(runs: list[RunDir]) -> None:
    assert configuration_differences(runs) == (
        ("CONFIG_EMA", "n", "y"),
        ("CONFIG_SEED", "1", "2"),
        ("CONFIG_EMA_DECAY", "-", "0.9"),
    )
    assert plan_differences(runs) == (
        ("micro batch", "32", "16"),
        ("accumulation", "2", "4"),
        ("last micro batch", "32", "16"),
        ("memory", "3.20 GB", "-"),
    )
    assert configuration_differences(runs[:1] * 2) == plan_differences(runs[:1] * 2) == ()


def test_curves_have_a_line_for_each_run_and_evaluations_come_first(runs: list[RunDir]) -> None:
    write_rows(runs[1], 20)
    charts, _ = overlaid(runs, NAMES)
    assert [chart["title"] for chart in charts] == [
        "accuracy, evaluation",
        "loss, training",
        "learning rate, training",
        "samples per second, training",
    ]
    for chart in charts:
        assert [(line["name"], line["style"]) for line in chart["lines"]] == [("one", 0), ("two", 1)]
        assert [line["factors"] for line in chart["lines"]] == [{"samples": 64}] * 2
    assert [line["step"][-1] for line in charts[1]["lines"]] == [60, 20]
    assert [line["seconds"][-1] for line in charts[1]["lines"]] == [12.0, 4.0]


def test_compute_is_an_axis_where_it_is_known_of_all(runs: list[RunDir]) -> None:
    store_findings(runs[0], all_findings())
    charts, notes = overlaid(runs, NAMES)
    assert "flop" not in charts[0]["axes"] and "operations of two" in notes[1]
    store_findings(runs[1], all_findings(flop_per_sample=1e9))
    charts, notes = overlaid(runs, NAMES)
    assert list(charts[0]["axes"]) == ["step", "samples", "seconds", "flop"] and len(notes) == 1
    assert [line["factors"]["flop"] for line in charts[0]["lines"]] == [64 * 2e9, 64 * 1e9]


def test_the_page_offers_the_axes(runs: list[RunDir]) -> None:
    table = Table(title="Runs", head=("run",), rows=(("one",), ("two",)))
    page = render(title="2 runs", summary="", sections=sections(runs, NAMES, table))
    assert '<option value="samples">samples seen</option>' in page and "CONFIG_EMA_DECAY" in page
    same = sections(runs[:1] * 2, NAMES, table)
    assert [section.notes for section in same[2:]] == [["There is none."]] * 2


def test_a_plan_of_another_version_is_an_error(runs: list[RunDir]) -> None:
    runs[1].write("plan", {"effective_batch": 64})
    with pytest.raises(ToolkitError, match="of another version"):
        plan_differences(runs)
