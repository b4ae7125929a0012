"""metrics.jsonl: one flat JSON object a line, one per measurement, appended in few large writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lib import atomic
from lib.errors import ToolkitError, os_error

Scalar: TypeAlias = str | int | float | bool | None


class MetricsWriter:
    """Appends rows to a file. Rows wait in memory until `flush`.

    All methods but `write` raise ToolkitError where the file cannot be written. What could not
    be written is kept, so that a later `flush` goes on at the very byte where the last one failed.
    """

    def __init__(self, path: Path) -> None:
        self._pending = b""
        self._rows: list[str] = []
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise os_error("write", error) from error

    def write(self, row: Mapping[str, Scalar]) -> None:
        """Add one row. A number that is not finite becomes null, and the field "note" says what it was."""
        self._rows.append(_line(row))

    def flush(self) -> None:
        """Hand all rows to the operating system, so that they survive the end of this process."""
        if not os.fstat(self._file.fileno()).st_nlink:
            path = Path(self._file.name)
            gone = path if path.parent.exists() else path.parent
            raise ToolkitError(f"{gone} is gone", why="it was removed while this run trained in it")
        self._hand_over()

    def close(self) -> None:
        try:
            self._hand_over()
        finally:
            self._file.close()

    def _hand_over(self) -> None:
        self._pending += "".join(self._rows).encode()
        self._rows.clear()
        try:
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]
        except OSError as error:
            error.filename = self._file.name
            raise os_error("write", error, todo="free some space") from error


def read(path: Path) -> list[dict[str, Any]]:
    """All rows. A last line without its end is one that is just being written, and is left out.

    Raises ToolkitError where the file is missing or a line in it is not a row.
    """
    return _rows(path, _bytes(path))


class Follower:
    """Reads a file of rows that grows: each row once, from the first on."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._lines = path, 0, 0

    def rows(self) -> list[dict[str, Any]]:
        """What was appended since the last call. A last line without its end waits for the next one.

        Raises ToolkitError where the file cannot be read or a line in it is not a row.
        """
        data = _bytes(self._path, start=self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        rows = _rows(self._path, whole, above=self._lines)
        self._offset += len(whole)
        self._lines += len(rows)
        return rows


def truncate_after(path: Path, step: int) -> int:
    """Drop the rows of later steps, and lines that are no rows, before a run goes on from `step`.

    Atomic. Returns how many whole lines were dropped; a file that is not there has none.
    Raises ToolkitError where the file cannot be read or written.
    """
    if not path.exists():
        return 0
    lines = list(_parse(_bytes(path)))
    kept = [line for line, row in lines if row is not None and row.get("step", step) <= step]
    try:
        atomic.write_bytes(path, b"".join(kept))
    except OSError as error:
        raise os_error("write", error) from error
    return len(lines) - len(kept)


def _bytes(path: Path, *, start: int = 0) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except OSError as error:
        raise os_error("read", error) from error


def _rows(path: Path, data: bytes, *, above: int = 0) -> list[dict[str, Any]]:
    """above: how many lines of the file come before `data`."""
    rows = []
    for number, (_, row) in enumerate(_parse(data), start=above + 1):
        if row is None:
            raise ToolkitError(f"{path}:{number} is not a JSON object with a step", todo="remove the line")
        rows.append(row)
    return rows


def _parse(data: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Whole lines with their rows; None for a line that is none."""
    for line in data.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        is_row = isinstance(row, dict) and isinstance(row.get("step", 0), int | float)
        yield line + b"\n", row if is_row else None


def _line(row: Mapping[str, Scalar]) -> str:
    try:
        return json.dumps(row, allow_nan=False) + "\n"
    except ValueError:
        odd = {
            name: value
            for name, value in row.items()
            if isinstance(value, float) and not math.isfinite(value)
        }
        notes = [str(row["note"])] if "note" in row else []
        notes += [f"{name} is {value}" for name, value in odd.items()]
        return json.dumps({**row, **dict.fromkeys(odd), "note": ", ".join(notes)}, allow_nan=False) + "\n"
