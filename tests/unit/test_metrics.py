import errno
import json
import math
import os
import resource
from pathlib import Path

import pytest

from lib import metrics
from lib.errors import ToolkitError
from lib.metrics import MetricsWriter


def strict(path: Path) -> list[dict[str, object]]:
    """All lines as a parser reads them that knows no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def write(path: Path, *steps: int) -> None:
    writer = MetricsWriter(path)
    for step in steps:
        writer.write({"kind": "train", "step": step, "loss": 1 / (step + 1)})
    writer.close()


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"kind": "train", "step": 1, "loss": 0.1, "note": "ü×"},
        {"kind": "eval", "step": 1, "accuracy": None},
    ]
    writer = MetricsWriter(path)
    for row in rows:
        writer.write(row)
    assert path.read_bytes() == b"", "rows wait for flush"
    writer.flush()
    assert metrics.read(path) == strict(path) == rows
    writer.close()
    write(path, 7)
    assert [row["step"] for row in metrics.read(path)] == [1, 1, 7]


def test_numbers_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"step": 1, "loss": math.nan, "norm": -math.inf, "accuracy": 0.5})
    writer.write({"step": 2, "loss": math.inf, "note": "warm-up"})
    writer.close()
    assert strict(path) == [
        {"step": 1, "loss": None, "norm": None, "accuracy": 0.5, "note": "loss is nan, norm is -inf"},
        {"step": 2, "loss": None, "note": "warm-up, loss is inf"},
    ]


def test_what_is_not_a_scalar_is_our_mistake(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(TypeError):
        writer.write({"loss": object()})  # type: ignore[dict-item]
    writer.close()
    assert strict(tmp_path / "metrics.jsonl") == []


def test_truncation_keeps_rows_up_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 10, 20, 30, 40)
    with path.open("ab") as file:
        file.write(b'{"kind": "note"}\n{"kind": "train", "step": 50, "lo')
    assert metrics.truncate_after(path, 20) == 2
    assert [row.get("step") for row in metrics.read(path)] == [10, 20, None]
    assert path.read_bytes().endswith(b"\n")
    write(path, 30)
    assert [row.get("step") for row in metrics.read(path)] == [10, 20, None, 30]
    assert metrics.truncate_after(path, 30) == 0
    assert metrics.truncate_after(tmp_path / "nowhere", 3) == 0


def test_truncation_drops_what_a_power_cut_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 10)
    with path.open("ab") as file:
        file.write(b"\0" * 300 + b"\n[3]\n")
    with pytest.raises(ToolkitError, match=r"metrics\.jsonl:2 is not a JSON object"):
        metrics.read(path)
    assert metrics.truncate_after(path, 10) == 2
    assert [row["step"] for row in metrics.read(path)] == [10]


def test_an_object_whose_step_is_no_number_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": "2"}\n')
    with pytest.raises(ToolkitError, match=r"metrics\.jsonl:2 is not a JSON object with a step; remove"):
        metrics.read(path)
    assert metrics.truncate_after(path, 5) == 1
    assert metrics.read(path) == [{"step": 1}]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    os.truncate(path, path.stat().st_size - 1)
    assert [row["step"] for row in metrics.read(path)] == [1]


def test_truncation_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ToolkitError, match="No space left"):
        metrics.truncate_after(path, 1)
    assert path.read_bytes() == before


def test_a_refused_write_is_taken_up_again_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    rows = [{"step": step, "loss": 0.5} for step in range(50)]
    for row in rows[:40]:
        writer.write(row)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (333, before[1]))
    try:
        with pytest.raises(
            ToolkitError, match=r"cannot write .*metrics\.jsonl: File too large; free some space"
        ):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.stat().st_size == 333
    for row in rows[40:]:
        writer.write(row)
    writer.close()
    assert strict(path) == rows


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="Is a directory"):
        MetricsWriter(tmp_path)
    with pytest.raises(ToolkitError, match=r"cannot read .*nowhere: No such file"):
        metrics.read(tmp_path / "nowhere")


def test_rows_are_not_written_into_a_file_that_is_gone(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1})
    writer.flush()
    (tmp_path / "metrics.jsonl").unlink()
    writer.write({"step": 2})
    with pytest.raises(ToolkitError, match=r"metrics\.jsonl is gone"):
        writer.flush()
    writer.close()


def test_a_follower_reads_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    follower = metrics.Follower(path)
    assert [row["step"] for row in follower.rows()] == [1, 2]
    assert follower.rows() == []
    with path.open("ab") as file:
        file.write(b'{"step": 3}\n{"st')
    assert [row["step"] for row in follower.rows()] == [3], "half a line waits"
    with path.open("ab") as file:
        file.write(b'ep": 4}\nno row\n')
    with pytest.raises(ToolkitError, match=r"metrics\.jsonl:5 is not a JSON object"):
        follower.rows()
