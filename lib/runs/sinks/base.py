"""Sinks: rows of metrics.jsonl passed on to other programs during a run.

metrics.jsonl is written first and is authoritative. Sinks read from it, so that a resumed run,
whose later rows were dropped, reports no step twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lib.runs.metrics import Follower

Row: TypeAlias = Mapping[str, Any]


class Sink(Protocol):
    """Interface of a consumer of metric rows."""

    def send(self, rows: Sequence[Row]) -> None:
        """Take the rows that follow those of the last call, beginning with those of earlier starts."""

    def close(self, *, done: bool) -> None:
        """Close the sink. done: the run has finished."""


class Sinks:
    """The open sinks of one run, fed from its metrics file, which must exist."""

    def __init__(self, path: Path, sinks: Sequence[Sink]) -> None:
        self._path, self._follower, self._sinks = path, Follower(path), sinks

    def catch_up(self) -> None:
        """Send every sink the rows written since the last call; the first call sends all existing rows."""
        if not self._sinks:
            return
        for rows in self._follower.batches():
            for sink in self._sinks:
                sink.send(rows)

    def close(self, *, done: bool) -> None:
        """Close every sink, even if one of them fails. done: the run has finished.

        A missing file is not reported here: a run whose directory was removed has an error of its own.
        """
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close, done=done)
            if self._path.exists():
                self.catch_up()


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row except its step, under names such as train/loss."""
    return {
        f"{row['kind']}/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    }
