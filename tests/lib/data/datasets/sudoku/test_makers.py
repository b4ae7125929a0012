"""Processes that make puzzles: how many, what comes of it, and that none outlives whoever asked for them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lib.data.datasets.sudoku.data import Options, open_sudoku
from lib.data.datasets.sudoku.generator import LEVELS, Puzzle, puzzles
from tests.e2e.forked import ROOT, Forked
from tests.models.trm.puzzles import small_puzzles


@pytest.mark.slow
def test_puzzles_do_not_depend_on_how_many_processes_make_them() -> None:
    level = LEVELS["medium"]
    assert list(puzzles(level, part="train", count=6, processes=2)) == list(
        puzzles(level, part="train", count=6)
    )


# Two processes make puzzles; when the first one comes, whoever asked for them is killed.
KILLED = """
import multiprocessing, os
from lib.data.datasets.sudoku.generator import LEVELS, puzzles
if __name__ == "__main__":
    for _ in puzzles(LEVELS["medium"], part="train", count=1000, processes=2):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_nobody_goes_on_making_puzzles_for_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    environment, told = {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "makers"
    killed = Forked(str(tmp_path / "killed.py"), [], environment=environment, output=told)
    assert killed.wait(timeout=120) == -9
    makers = told.read_text().split()
    assert len(makers) == 2
    deadline = time.monotonic() + 30
    while any(map(is_running, makers)):
        assert time.monotonic() < deadline, "they are still there"
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return bool(Path("/proc", pid, "cmdline").read_bytes())  # nothing where it has ended
    except OSError:
        return False


@pytest.mark.slow
def test_puzzles_are_made_by_as_many_processes_as_are_worth_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = list[int]()

    def made(*_: object, count: int, processes: int, **__: object) -> list[Puzzle]:
        requested.append(processes)
        return small_puzzles("train", count)

    monkeypatch.setattr("lib.data.datasets.sudoku.data.puzzles", made)
    monkeypatch.setattr("lib.data.datasets.sudoku.data.cpu_count", lambda: 6)
    for level in ("easy", "hard"):
        options = Options(level=level, clues=None, train_size=400, test_size=50)
        open_sudoku(options, cache_dir=tmp_path, log=lambda _: None)
    options = Options(level="hard", clues=None, train_size=1000, test_size=50)
    open_sudoku(options, cache_dir=tmp_path, log=lambda _: None)
    assert requested == [1, 1, 4, 1, 6, 1]
