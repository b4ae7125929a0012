"""make compare: which runs it takes, what it prints, and the page that it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lib.errors import ConfigError, ToolkitError
from lib.plan.types import fixed_plan
from lib.reports.page import render, section, table
from lib.runs.directory import RunDir
from lib.runs.index import read_runs
from scripts import compare, curve
from scripts.compare import MOST_RUNS
from tests.support.reported import reported_run, write_rows
from train.report import report

NAMES = ("one", "two")


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", "--runs", str(folder), *arguments])
    assert compare.main() == 0


def test_two_runs_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = reported_run(tmp_path, 1), reported_run(tmp_path, 2)
    call(monkeypatch, tmp_path, f"{one.name} lenet5/{two.name}")
    printed = capsys.readouterr().out
    assert "accuracy 0.8836" in printed and "Differences of the plan\n  There is none.\n" in printed
    assert [line.split() for line in printed.splitlines() if "CONFIG_" in line] == [["CONFIG_SEED", "1", "2"]]
    page = (tmp_path / "compare.html").read_text()
    assert one.name in page and two.name in page and "<title>2 runs compared</title>" in page
    assert "</svg> SEED=1</li>" in page and "</svg> SEED=2</li>" in page


def test_runs_by_a_condition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reported_run(tmp_path, number) for number in (1, 2, 3)]
    call(monkeypatch, tmp_path, "--where", "seed>1", "--out", str(tmp_path / "out" / "page.html"))
    page = (tmp_path / "out" / "page.html").read_text()
    assert [run.name in page for run in runs] == [False, True, True]
    assert str(tmp_path / "out" / "page.html") in capsys.readouterr().out


@pytest.mark.parametrize("command", ["compare", "curve", "report"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "file").touch()
    for out, told in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "file" / "x", "cannot be"),
        (tmp_path / "README.md", f"README.md does not end in .{'json' if command == 'curve' else 'html'}"),
    ):
        arguments = [command, "--runs", str(tmp_path), f"--out={out}"]  # there is no run, which is told later
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(ConfigError, match=told):
            if command == "report":
                report("", root=tmp_path, runs=tmp_path, out=out)
            else:
                {"compare": compare, "curve": curve}[command].main()


def test_runs_of_a_sweep_have_names_that_runs_and_report_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [reported_run(tmp_path / "sweeps" / "mine" / str(number), number) for number in (1, 2)]
    call(monkeypatch, tmp_path, "--where", "run=sweeps/mine/*")
    printed = capsys.readouterr().out
    for run in runs:
        name = str(run.path.relative_to(tmp_path))
        assert f" {name}\n" in printed and name in [row.run for row in read_runs(tmp_path)]


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
        assert 'S=""' not in str(caught.value) and str(caught.value).startswith(("RUNS=", "WHERE=", "make "))
    for number in range(2, MOST_RUNS + 2):
        reported_run(tmp_path, number, rows=1)
    with pytest.raises(ConfigError, match=f"selects {MOST_RUNS + 1} runs"):
        compare.selected(tmp_path, "", "model=lenet5")


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDir]:
    one, two = reported_run(tmp_path, 1), reported_run(tmp_path, 2, EMA=True, EMA_DECAY=0.9)
    two.write("plan", fixed_plan("another reason", micro_batch=16, accumulation=4, device="cuda").to_json())
    return [one, two]


def test_only_what_differs_is_listed(runs: list[RunDir]) -> None:
    found = compare.differences(runs, NAMES)
    options, decisions = (section.blocks[0] for section in found[:2])
    assert options["head"] == ["option", "one", "two"]
    assert options["rows"] == [
        ["CONFIG_EMA", "n", "y"],
        ["CONFIG_SEED", "1", "2"],
        ["CONFIG_EMA_DECAY", "-", "0.9"],
    ]
    assert decisions["rows"] == [
        ["micro batch", "32", "16"],
        ["accumulation", "2", "4"],
        ["last micro batch", "32", "16"],
        ["memory", "3.20 GB", "-"],
    ]
    legends = compare.legends_of(NAMES, found[0])
    assert legends == ["EMA=n SEED=1 EMA_DECAY=-", "EMA=y SEED=2 EMA_DECAY=0.9"]
    same = compare.differences(runs[:1] * 2, NAMES)
    assert [(section.notes, section.blocks) for section in same] == [(["There is none."], [])] * 3


def test_runs_of_other_code_differ(
    runs: list[RunDir], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, digit in zip(runs, "ab", strict=True):
        facts = {"model": {"sha256": 64 * "c"}, "data set": {"sha256": 64 * digit}}
        run.write("plugins", facts)
    runs[1].write("env", {"torch": "2.13.0", "git_commit": 40 * "d"})
    code = compare.differences(runs, NAMES)[2]
    assert code.blocks[0]["rows"] == [["data set", 8 * "a", 8 * "b"], ["git commit", "-", 8 * "d"]]
    runs[0].write("plugins", {"data set": {"sha256": 64 * "b", "former": [64 * "a"]}})
    rows = compare.differences(runs, NAMES)[2].blocks[0]["rows"]
    assert ["data set", f"{8 * 'a'}+{8 * 'b'}", 8 * "b"] in rows, "of one that resumed with the other's code"
    call(monkeypatch, folder := runs[0].path.parent.parent, " ".join(run.name for run in runs))
    assert "Differences of the code" in capsys.readouterr().out
    assert 8 * "b" in (folder / "compare.html").read_text()


def test_legends_begin_with_names_only_where_options_do_not_tell_runs_apart() -> None:
    def legends(names: tuple[str, ...], **options: tuple[str, ...]) -> list[str]:
        rows = [(f"CONFIG_{name}", *values) for name, values in options.items()]
        return compare.legends_of(names, section("", table("", ("option", *names), rows)))

    reruns = ("20261121T093620Z-a1f5e51b", "20261121T093755Z-a1f5e51b", "20261121T093800Z-b2")
    assert legends(reruns[:2]) == ["20261121T093620Z", "20261121T093755Z"]
    assert legends(reruns, SEED=("1", "1", "2")) == [
        f"{name} SEED={seed}" for name, seed in zip(reruns, "112", strict=True)
    ]
    of_sweep = tuple(f"sweeps/mine/{name}/lenet5/20261121T093620Z-{name}" for name in ("a1", "b2"))
    many = dict.fromkeys("VWXYZ", ("y", "n"))
    assert legends(of_sweep, **many) == ["a1 V=y W=y X=y ...", "b2 V=n W=n X=n ..."]


def test_curves_have_a_line_for_each_run_and_evaluations_come_first(runs: list[RunDir]) -> None:
    write_rows(runs[1], 20)
    charts = compare.curves(runs, NAMES).blocks
    assert [chart["title"] for chart in charts] == [
        "accuracy, evaluation",
        "loss, training",
        "learning rate, training",
        "samples per second, training",
        "peak memory bytes, training",
    ]
    for chart in charts:
        assert [(line["name"], line["style"]) for line in chart["lines"]] == [("one", 0), ("two", 1)]
        assert [line["factors"] for line in chart["lines"]] == [{"samples": 64}] * 2
    assert [line["step"][-1] for line in charts[1]["lines"]] == [60, 20]
    assert [line["seconds"][-1] for line in charts[1]["lines"]] == [12.0, 4.0]


def test_compute_is_an_axis_where_it_is_known_of_all(runs: list[RunDir]) -> None:
    runs[0].write("data", {"name": "digits", "flop_per_sample": 2e9})
    _, notes, charts = compare.curves(runs, NAMES)
    assert "flop" not in charts[0]["axes"] and "operations of two" in notes[1]
    runs[1].write("data", {"name": "digits", "flop_per_sample": 1e9})
    _, notes, charts = compare.curves(runs, NAMES)
    assert list(charts[0]["axes"]) == ["step", "samples", "seconds", "flop"] and len(notes) == 1
    assert [line["factors"]["flop"] for line in charts[0]["lines"]] == [64 * 2e9, 64 * 1e9]


def test_the_page_offers_the_axes(runs: list[RunDir]) -> None:
    page = render(title="2 runs", summary="", sections=[compare.curves(runs, NAMES)])
    assert '<option value="samples">samples seen</option>' in page


def test_a_plan_of_another_version_is_an_error(runs: list[RunDir]) -> None:
    runs[1].write("plan", {"effective_batch": 64})
    with pytest.raises(ToolkitError, match="by another version"):
        compare.differences(runs, NAMES)
