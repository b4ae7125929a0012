"""What machines that met make sure of before they train."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from lib.devices.base import Backend
from lib.errors import ToolkitError
from train.multi_node import check_shared_directory


class Ranks:
    """What two processes tell each other, of which each is a thread."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.told: list[Any] = [None, None]

    def exchanged(self, rank: int, value: Any) -> list[Any]:
        self.told[rank] = value
        self.barrier.wait()
        told = list(self.told)
        self.barrier.wait()
        return told


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.is_main = ranks, rank, rank == 0

    def broadcast(self, value: Any) -> Any:
        return self.ranks.exchanged(self.rank, value)[0]

    def all_reduce_max(self, values: Sequence[float]) -> tuple[float, ...]:
        return tuple(map(max, zip(*self.ranks.exchanged(self.rank, values), strict=True)))


def refusals(*directories: Path) -> list[str]:
    """What is said on each of two ranks that have these directories of runs; "" for nothing."""
    ranks = Ranks()

    def told(rank: int) -> str:
        try:
            check_shared_directory(cast(Backend, Rank(ranks, rank)), directories[rank])
        except ToolkitError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as both:
        return list(both.map(told, (0, 1)))


def test_machines_see_one_directory_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    (tmp_path / "link").symlink_to(shared)
    assert refusals(shared, tmp_path / "link") == ["", ""]
    monkeypatch.chdir(tmp_path)
    assert refusals(Path("shared"), shared) == ["", ""]
    for told in refusals(tmp_path / "one", tmp_path / "two"):
        assert told.startswith("the nodes do not share one directory of runs: "), told
    assert not list(tmp_path.glob("*/*")), "nothing is left"


def test_one_directory_by_two_paths_is_refused(tmp_path: Path) -> None:
    """What rank 0 calls a checkpoint is what the others open."""

    class Other:
        is_main = False
        broadcast = staticmethod(lambda _: "/only/there/.rendezvous-name")
        all_reduce_max = staticmethod(tuple)

    (tmp_path / ".rendezvous-name").touch()
    with pytest.raises(ToolkitError, match="the same path"):
        check_shared_directory(cast(Backend, Other()), tmp_path)


def test_a_directory_of_runs_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    class Main:
        is_main = True

    with pytest.raises(ToolkitError, match=r"cannot write to .*: "):
        check_shared_directory(cast(Backend, Main()), tmp_path / "file" / "runs")
