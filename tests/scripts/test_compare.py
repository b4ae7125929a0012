"""make compare: which runs it takes, what it prints, and the page that it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.reports.comparison import MOST_RUNS
from scripts import compare
from tests.support.reported import reported_run


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", "--runs", str(folder), *arguments])
    assert compare.main() == 0


def test_two_runs_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = reported_run(tmp_path, 1), reported_run(tmp_path, 2)
    call(monkeypatch, tmp_path, f"{one.name} lenet5/{two.name}")
    printed = capsys.readouterr().out
    assert "accuracy 0.8836" in printed and "Differences of the plan: none" in printed
    assert [line.split() for line in printed.splitlines() if "CONFIG_" in line] == [["CONFIG_SEED", "1", "2"]]
    page = (tmp_path / "compare.html").read_text()
    assert one.name in page and two.name in page and "<title>2 runs compared</title>" in page


def test_runs_by_a_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reported_run(tmp_path, number) for number in (1, 2, 3)]
    call(monkeypatch, tmp_path, "--where", "seed>1", "--out", str(tmp_path / "out" / "page.html"))
    page = (tmp_path / "out" / "page.html").read_text()
    assert [run.name in page for run in runs] == [False, True, True]
    assert str(tmp_path / "out" / "page.html") in capsys.readouterr().out


def test_a_run_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    one, two = reported_run(tmp_path, 1), reported_run(tmp_path, 2)
    found = compare.selected(tmp_path, f"{one.name} {two.name} {one.path}", "model=lenet5")
    assert [run.name for run in found] == [one.name, two.name]


@pytest.mark.slow
def test_too_few_and_too_many_runs_are_refused(tmp_path: Path) -> None:
    one = reported_run(tmp_path, 1)
    for names, where in (("", ""), (one.name, ""), ("", "seed=1"), (f"{one.name} {one.name}", "")):
        with pytest.raises(ConfigError, match="a comparison is of 2 to") as caught:
            compare.selected(tmp_path, names, where)
        assert caught.value.exit_code == 2 and "make runs lists them" in str(caught.value)
    for number in range(2, MOST_RUNS + 2):
        reported_run(tmp_path, number, rows=1)
    with pytest.raises(ConfigError, match=f"selects {MOST_RUNS + 1} runs"):
        compare.selected(tmp_path, "", "model=lenet5")
