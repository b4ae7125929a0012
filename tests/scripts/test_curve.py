"""Curves over examples: when a bar is reached, and whether a run is near a reference."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from lib.errors import ConfigError, ToolkitError, run_main
from lib.reports.series import series_of
from lib.runs.directory import RunDir
from scripts import curve as script
from scripts.curve import Curve, compare, curve_of, read_stored, store

ROWS = [
    {"kind": "train", "step": 10, "loss": 9.0, "accuracy": 0.99},
    {"kind": "eval", "step": 10, "epoch": 0.1, "loss": 2.0, "accuracy": 0.5, "exact_accuracy": 0.0},
    {"kind": "eval", "step": 20, "epoch": 0.2, "loss": 1.0, "accuracy": 0.8, "exact_accuracy": None},
    {"kind": "eval", "step": 40, "epoch": 0.4, "loss": 0.5, "accuracy": 0.9, "exact_accuracy": 0.4},
]

SERIES = series_of(ROWS)


def curve(*points: tuple[int, float], column: str = "accuracy", run: str = "m/run") -> Curve:
    return Curve(run=run, column=column, points=points)


def test_examples_are_steps_times_the_effective_batch() -> None:
    found = curve_of(SERIES, run="m/run", column="accuracy", effective_batch=8)
    assert found == curve((80, 0.5), (160, 0.8), (320, 0.9))
    chosen = curve_of(SERIES, run="m/run", column="", effective_batch=8)
    assert chosen == curve((80, 0.0), (320, 0.4), column="exact_accuracy"), "what is no number is no point"
    with pytest.raises(ConfigError, match=r"no evaluation of m/run has acuracy; COLUMN= is one of loss, acc"):
        curve_of(SERIES, run="m/run", column="acuracy", effective_batch=8)
    with pytest.raises(ConfigError, match="no evaluation of m/run has a number"):
        curve_of(series_of(ROWS[:1]), run="m/run", column="", effective_batch=8)


def test_a_bar_is_reached_in_a_straight_line_between_evaluations() -> None:
    rising = curve((100, 0.5), (200, 0.8), (400, 0.9), (500, 0.2), (600, 0.95))
    assert rising.examples_to(0.85) == pytest.approx(300.0)
    assert rising.examples_to(0.8) == 200.0
    assert rising.examples_to(0.93) == pytest.approx(500 + 100 * 0.73 / 0.75)
    assert rising.examples_to(0.96) is None
    assert rising.examples_to(0.3) == 100.0, "it was there before anybody looked"


def test_a_loss_reaches_a_bar_from_above() -> None:
    falling = curve((100, 2.0), (200, 1.0), column="loss")
    assert falling.examples_to(1.5) == pytest.approx(150.0)
    assert falling.examples_to(2.5) == 100.0
    assert falling.examples_to(0.9) is None


def test_runs_of_other_intervals_and_batches_are_compared_at_the_same_examples() -> None:
    reference = curve((50, 0.1), (100, 0.5), (150, 0.6), (300, 0.9), run="other")
    found = compare(curve((100, 0.52), (200, 0.72), (260, 0.9)), reference)
    assert [examples for examples, *_ in found] == [100, 150, 300], "from its first evaluation on"
    assert [value for *_, value in found] == pytest.approx([0.52, 0.62, math.nan], nan_ok=True)


def test_curves_that_cannot_be_compared_are_told() -> None:
    with pytest.raises(ConfigError, match="other is a curve of loss, not of accuracy; give COLUMN=loss"):
        compare(curve((1, 0.1)), curve((1, 0.1), column="loss", run="other"))
    with pytest.raises(ConfigError, match=r"no examples in common: one begins at 9, the other ends at 5"):
        compare(curve((9, 0.1)), curve((5, 0.1), run="other"))


def test_a_reference_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "reference.json"
    store(curve((100, 0.1), (200, 1 / 3)), file)
    assert read_stored(file) == curve((100, 0.1), (200, 1 / 3))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"run": "a", "column": "b", "points": []}',
        '{"run": "a", "column": "b", "points": [[1]]}',
        '{"run": "a", "column": "b", "points": [[1e999, 1]]}',
    ],
)
def test_a_file_that_is_no_reference_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ToolkitError, match="file is not a stored curve"):
        read_stored(tmp_path / "file")
    (tmp_path / "file").write_text(json.dumps({"run": "a", "column": "b", "points": [[1, math.nan]]}))
    with pytest.raises(ToolkitError, match="no points, or one is not finite"):
        read_stored(tmp_path / "file")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of ROWS with 8 samples a step, and later one of the same course that is 0.04 worse."""
    for identity, less in (("00000001", 0.0), ("00000002", 0.04)):
        files = {"config": "", "plan": {"effective_batch": 8}}
        run = RunDir.create(tmp_path / "runs", model="m", identity=identity, files=files)
        rows = [row | {"accuracy": row["accuracy"] - less} for row in ROWS]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        run.release()
    return tmp_path / "runs"


def call(monkeypatch: pytest.MonkeyPatch, runs: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["curve", "--runs", str(runs), *arguments])
    return run_main(script.main)


def run_named(runs: Path, identity: str) -> str:
    return next(path.name for path in (runs / "m").iterdir() if path.name.endswith(identity))


def test_a_run_within_the_tolerance_passes_and_one_outside_fails(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_named(runs, "00000001"), run_named(runs, "00000002")
    file = runs.parent / "reference.json"
    assert call(monkeypatch, runs, "--column=accuracy", f"--out={file}", first) == 0
    out = capsys.readouterr().out
    assert "0.85 was reached in about 240 examples" in out and f"stored as {file}" in out
    for reference in (str(file), first):
        against = [f"--reference={reference}", "--column=accuracy", second]
        assert call(monkeypatch, runs, *against) == 0
        assert "all 3 points are within 0.05" in capsys.readouterr().out
        assert call(monkeypatch, runs, "--tolerance=0.03", *against) == 1
        captured = capsys.readouterr()
        assert captured.out.count("  outside\n") == 3
        assert "error: 3 of 3 points of m/" in captured.err and "not within 0.03 of m/" in captured.err
    assert call(monkeypatch, runs, f"--reference={file}", "--tolerance=0.03", first) == 0, "its column, too"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tolerance=0.1"], "TOLERANCE= needs a comparison"),
        (["--threshold=much"], "THRESHOLD=much is not a non-negative number"),
        (["--column=nothing"], "COLUMN= is one of"),
        (["--reference=nowhere"], "REFERENCE=nowhere is neither a file nor a run"),
    ],
)
def test_what_cannot_be_asked_is_told(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    assert call(monkeypatch, runs, *arguments) in (1, 2)
    assert told in capsys.readouterr().err


def test_a_bar_that_is_not_reached_is_told(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, runs, run_named(runs, "00000001")) == 0
    assert (
        "exact_accuracy" in (out := capsys.readouterr().out) and "0.85 was not reached in 320 examples" in out
    )
    assert call(monkeypatch, runs, "--column=loss", run_named(runs, "00000001")) == 0
    assert "reached" not in capsys.readouterr().out, "no bar of a loss is known"
    assert call(monkeypatch, runs, "--column=loss", "--threshold=2", run_named(runs, "00000001")) == 0
    assert "2 was reached by the first evaluation, in 80 examples or fewer" in capsys.readouterr().out
