import errno
import json
import math
import os
import resource
import tracemalloc
from pathlib import Path

import pytest

from lib.errors import ToolkitError
from lib.runs import metrics
from lib.runs.metrics import MetricsWriter


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
    with path.open("ab") as file:
        file.write(b'{"kind": "note"}\n')  # which stays, so that the file is written anew
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


def test_losses_and_errors_are_better_when_lower() -> None:
    lower = {"loss", "val_loss", "calibration_error", "perplexity", "mse", "rmse_price", "wer", "nll"}
    higher = {"accuracy", "macro_f1", "r2_loss", "roc_auc", "lossless"}
    assert {name for name in lower | higher if metrics.higher_is_better(name)} == higher


def test_a_follower_reads_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    follower = metrics.Follower(path)

    def steps() -> list[int]:
        return [row["step"] for rows in follower.batches() for row in rows]

    assert steps() == [1, 2]
    assert steps() == []
    with path.open("ab") as file:
        file.write(b'{"step": 3}\n{"st')
    assert steps() == [3], "half a line waits"
    with path.open("ab") as file:
        file.write(b'ep": 4}\nno row\n')
    with pytest.raises(ToolkitError, match=r"metrics\.jsonl:5 is not a JSON object"):
        steps()


MANY = 12_000


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "metrics.jsonl"
    write(path, *range(1, MANY + 1))
    assert path.stat().st_size > 600_000
    return path


def parsed_rows(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One for each row that is parsed from now on."""
    lines: list[None] = []
    loads = json.loads

    def counted(line: bytes) -> object:
        lines.append(None)
        return loads(line)

    monkeypatch.setattr(metrics.json, "loads", counted)
    return lines


@pytest.mark.parametrize(("step", "parsed"), [(MANY, 1), (MANY - 3, 4), (MANY - 3000, 3001)])
def test_a_long_file_is_truncated_from_its_end(
    step: int, parsed: int, long_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(long_file.read_bytes() + b'{"step": 1')  # and a row that is half written
    lines = parsed_rows(monkeypatch)
    tracemalloc.start()
    try:
        assert metrics.truncate_after(path, step) == MANY - step
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        monkeypatch.undo()
    assert len(lines) == parsed
    assert peak < 400_000, "not the whole file"
    assert path.read_bytes() == b"".join(long_file.read_bytes().splitlines(keepends=True)[:step])


def test_a_hole_of_a_power_cut_before_rows_that_stay_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 10)
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "step' + b"\0" * 100 + b'"loss": 1}\n')
    write(path, 20, 30)
    assert metrics.truncate_after(path, 20) == 2
    assert [row["step"] for row in metrics.read(path)] == [10, 20]


def test_a_follower_never_has_more_than_a_batch(long_file: Path) -> None:
    sizes = [len(rows) for rows in metrics.Follower(long_file).batches()]
    assert sum(sizes) == MANY and max(sizes) == metrics.BATCH_ROWS


def test_lines_come_backwards_as_they_come_forwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever blocks end."""
    path = tmp_path / "lines"
    for content in (b"", b"\n", b"a", b"ab\n\nc\ndef\n", b"\n\nab", b"abcdefgh\n"):
        path.write_bytes(content)
        lines = content.splitlines(keepends=True)
        for size in range(1, 10):
            monkeypatch.setattr(metrics, "_BLOCK_BYTES", size)
            with path.open("rb") as file:
                found = list(metrics._backwards(file))
            assert [line for _, line in found] == lines[::-1]
            assert all(content[offset:].startswith(line) for offset, line in found)


@pytest.mark.parametrize("damage", [b"", b"x", b"\0", b"\n"])
def test_damage_is_seen_wherever_blocks_end(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n' + damage + b'{"a": 2}\n{"a": 3}\n')
    for size in range(1, 30):
        monkeypatch.setattr(metrics, "_BLOCK_BYTES", size)
        with path.open("rb") as file:
            assert metrics._is_undamaged(file, path.stat().st_size) == (not damage)


def test_the_tail_is_the_last_rows_of_a_file_of_any_size(tmp_path: Path) -> None:
    file = tmp_path / "metrics"
    assert metrics.tail(file) == []
    rows = [{"step": step, "text": "x" * 1000} for step in range(100)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "damaged\n" + '{"step": 100')
    found = metrics.tail(file)
    assert found == rows[-len(found) :] and 60 <= len(found) < 66
    with file.open("r+b") as whole:
        whole.seek(20 * 10**9)  # the rest is a hole
        whole.write(b'\n{"step": 101}\n')
    assert metrics.tail(file) == [{"step": 101}]
