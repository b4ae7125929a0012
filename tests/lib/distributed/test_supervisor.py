"""What other ranks than rank 0 have written is in the run directory."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from lib.distributed import supervisor
from lib.runs.directory import RunDir


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    for attempt, said in ((0, "first\n"), (1, "second\n")):
        for rank, text in ((1, said), (2, "")):
            folder = tmp_path / "notes" / "id" / f"attempt_{attempt}" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
            (folder / "stdout.log").write_text("")
    return tmp_path / "notes"


def test_all_attempts_are_kept_and_silent_ranks_leave_nothing(notes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    supervisor.keep_rank_logs(notes, RunDir(run), hostname="")
    assert {path.name: path.read_text() for path in (run / "ranks").iterdir()} == {"1.txt": "first\nsecond\n"}
    supervisor.keep_rank_logs(notes, RunDir(run), hostname="node7")
    assert {path.name for path in (run / "ranks").iterdir()} == {"1.txt", "node7-1.txt"}


def test_of_much_the_end_is_kept(notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MAX_LOG_BYTES", 4)
    (tmp_path / "run").mkdir()
    supervisor.keep_rank_logs(notes, RunDir(tmp_path / "run"), hostname="")
    kept = (tmp_path / "run" / "ranks" / "1.txt").read_text()
    assert kept.count("left out") == 2 and kept.endswith("ond\n") and "seco" not in kept


def test_a_place_that_is_gone_is_told(notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stderr__", told := io.StringIO())
    supervisor.keep_rank_logs(notes, RunDir(tmp_path / "gone"), hostname="")
    assert told.getvalue().startswith("the output of other ranks is not kept: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes"]
