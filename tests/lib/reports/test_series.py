"""Series of metrics.jsonl: which columns there are, and which points of a long one are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import ToolkitError
from lib.reports.series import MOST_POINTS, extremes, read_series
from tests.support.reported import reported_run, write_rows


@given(st.lists(st.floats(-1e9, 1e9), max_size=300), st.integers(1, 20).map(lambda half: 2 * half))
def test_the_extremes_of_equal_stretches_are_kept(values: list[float], most: int) -> None:
    kept = extremes(values, most)
    assert kept == sorted(set(kept)) and len(kept) <= max(most, 0)
    assert {*kept[:1], *kept[-1:]} == ({0, len(values) - 1} if values else set())
    if len(values) <= most:
        assert kept == list(range(len(values)))
        return
    stretches = most // 2 - 1
    for number in range(stretches):
        stretch = range(number * len(values) // stretches, (number + 1) * len(values) // stretches)
        shown, own = ([values[place] for place in places] for places in ({*stretch} & {*kept}, stretch))
        assert (min(shown), max(shown)) == (min(own), max(own))


def test_columns_of_both_kinds_with_the_time_of_their_rows(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    rows = write_rows(run, 25, every=10)
    found = {(each.kind, each.column): each for each in read_series(run.metrics)}
    assert set(found) == {
        ("train", "loss"),
        ("train", "learning_rate"),
        ("train", "samples_per_second"),
        ("train", "peak_memory_bytes"),
        ("eval", "accuracy"),
    }
    train = [row for row in rows if row["kind"] == "train"]
    assert list(found["train", "loss"].values) == [row["loss"] for row in train]
    assert list(found["train", "loss"].seconds) == [row["seconds"] for row in train]
    evaluation = found["eval", "accuracy"]
    assert list(evaluation.steps) == [10, 20] and list(evaluation.seconds) == [2.0, 4.0]


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = [
        {"kind": "train", "step": 1, "loss": None, "note": "loss is nan"},
        {"kind": "train", "step": 2, "loss": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (loss,) = read_series(path)
    assert (loss.column, list(loss.steps), list(loss.values)) == ("loss", [2], [3.0])
    assert read_series(tmp_path / "none") == []
    path.write_text("damaged\n")
    with pytest.raises(ToolkitError, match="remove the line"):
        read_series(path)


def test_a_last_line_that_is_not_whole_is_damage_of_a_run_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"\xff\xfe\xfd")
    assert read_series(path) == []
    with pytest.raises(ToolkitError, match="rows:1 is not a JSON object"):
        read_series(path, ended=True)


def test_a_long_series_says_how_many_rows_it_stands_for(tmp_path: Path) -> None:
    run = reported_run(tmp_path)
    write_rows(run, 5000)
    loss = next(each for each in read_series(run.metrics) if each.column == "loss")
    content = loss.to_json(name="training")
    assert content["rows"] == 5000 and len(content["value"]) <= MOST_POINTS
    assert max(content["value"]) == pytest.approx(max(loss.values), rel=1e-6)
    assert len(content["step"]) == len(content["seconds"]) == len(content["value"])
