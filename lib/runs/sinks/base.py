"""Rows of metrics.jsonl for other programs, kept up while a run goes.

metrics.jsonl comes first and is what counts. A sink is given what has been written there, so that a resumed
run, whose later rows were cut off, reports no step twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lib.runs.metrics import Follower

Row: TypeAlias = Mapping[str, Any]


class Sink(Protocol):
    def send(self, rows: Sequence[Row]) -> None:
        """Take the rows that follow those of the last call; the first ones are those of earlier starts."""

    def close(self, *, done: bool) -> None:
        """Nothing comes any more. done: the run has come to its end."""


class Sinks:
    """Sinks that are kept up with a file of rows, which is there."""

    def __init__(self, path: Path, sinks: Sequence[Sink]) -> None:
        self._path, self._follower, self._sinks = path, Follower(path), sinks

    def catch_up(self) -> None:
        """Give every sink what has been written since the last time; at first, what is there from earlier."""
        if not self._sinks:
            return
        for rows in self._follower.batches():
            for sink in self._sinks:
                sink.send(rows)

    def close(self, *, done: bool) -> None:
        """Close every sink, even where one of them fails. done: the run has come to its end.

        A run whose directory was removed has an error of its own to tell.
        """
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close, done=done)
            if self._path.exists():
                self.catch_up()


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row but its step, by names such as train/loss."""
    return {
        f"{row['kind']}/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    }
