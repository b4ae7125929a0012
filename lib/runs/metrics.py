"""metrics.jsonl: one flat JSON object per line and measurement, appended in few large writes."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from lib import atomic
from lib.errors import ToolkitError, os_errors

Scalar: TypeAlias = str | int | float | bool | None

PREFERRED = ("exact_accuracy", "accuracy", "loss")  # evaluation metrics, in order, when none is requested
KINDS = ("train", "eval", "speed")  # of rows; at one step in this order
BATCH_ROWS = 1000
_BLOCK_BYTES = 1 << 16

PEAK = "peak_memory_bytes"  # column: of training so far, in the process that writes the rows
SHARES = (
    "data_wait",
    "gradient_wait",
    "device_utilization",
    "model_flop_utilization",
)  # of time, of the peak
# Columns of metrics.jsonl that every run has, and keys of status.json: no task has a metric of such a name.
RESERVED = frozenset(
    {"kind", "note", "step", "epoch", "seconds", "samples_per_second", "micro_batch", "learning_rate", PEAK}
    | {*SHARES, "compilations", "compile_seconds", "state", "reason", "part"}
)
RESERVED_SUMS = RESERVED | {"loss", "count"}  # no names of a task's `Sums.metrics`
_TOKENS = frozenset({"bytes", "chars", "tokens"})  # units of a loss that follow from a tokenizer
_COUNTS = _TOKENS | {"samples", "words", "conversations"}  # of what was evaluated
NOT_METRICS = RESERVED | _COUNTS  # columns and results by which nothing is judged
WHATEVER_TOKENS = ("bits_per_byte", "exact_match")  # metrics of a text, however it is split
_LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "mae", "rmse", "mse", "mape", "nll", "wer", "cer", "fid")
_LOWER_BY_TARGET = ("mae_", "rmse_")  # of several targets, each with its name
_LOWER_BY_WORD = {"loss", "error"}


def preferred(names: Collection[str], best: object = "") -> str:
    """Return the metric to judge by when none is requested; "" where `names` has none of PREFERRED.

    best: CONFIG_BEST_METRIC of the runs, which comes first.
    """
    return next((str(name) for name in (best, *PREFERRED) if name in names), "")


def higher_is_better(metric: str) -> bool:
    """Return False for a metric that training lowers, such as one with "loss" or "error" in its name."""
    if metric.startswith("r2_"):  # of a target, whatever its name
        return True
    lower = metric in _LOWER_IS_BETTER or metric.startswith(_LOWER_BY_TARGET)
    return not (lower or _LOWER_BY_WORD & {*metric.split("_")})


def counts_of(figures: Mapping[str, float], metric: str) -> str:
    """Return as text the counts of an evaluation that are equal where `metric` can be compared."""
    names = _COUNTS - _TOKENS if metric in WHATEVER_TOKENS else _COUNTS
    return ", ".join(f"{number:,.0f} {name}" for name, number in sorted(figures.items()) if name in names)


def format_value(name: str, value: float) -> str:
    """Format a column: a share as per cent, anything else with four digits or as a whole number."""
    if name.removeprefix("least_").removeprefix("most_") in SHARES:
        return f"{value:.1%}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


class MetricsWriter:
    """Buffered appender of rows to a file; rows stay in memory until `flush`.

    All methods but `write` raise ToolkitError if the file cannot be written. Unwritten bytes are
    kept, so that a later `flush` continues at the byte where the last one failed.
    """

    def __init__(self, path: Path) -> None:
        self._pending = b""
        self._rows: list[str] = []
        with os_errors("write"):
            self._file = path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Scalar]) -> None:
        """Add one row. Non-finite numbers become null, and the field "note" names their values."""
        try:
            line = json.dumps(row, allow_nan=False)
        except ValueError:
            floats = {name: value for name, value in row.items() if isinstance(value, float)}
            odd = {name: value for name, value in floats.items() if not math.isfinite(value)}
            notes = [str(row["note"])] if "note" in row else []
            notes += [f"{name} is {value}" for name, value in odd.items()]
            line = json.dumps({**row, **dict.fromkeys(odd), "note": ", ".join(notes)}, allow_nan=False)
        self._rows.append(line + "\n")

    def flush(self) -> None:
        """Hand all rows to the operating system, so that they survive the end of this process."""
        if not os.fstat(self._file.fileno()).st_nlink:
            path = Path(self._file.name)
            gone = path if path.parent.exists() else path.parent
            raise ToolkitError(f"{gone} is gone", why="it was removed while this run trained in it")
        self._hand_over()

    def close(self) -> None:
        """Flush, and close the file even if that fails."""
        try:
            self._hand_over()
        finally:
            self._file.close()

    def _hand_over(self) -> None:
        self._pending += "".join(self._rows).encode()
        self._rows.clear()
        with os_errors("write", todo="free some space"), atomic.naming(Path(self._file.name)):
            while self._pending:
                self._pending = self._pending[self._file.write(self._pending) :]


def read(path: Path) -> list[dict[str, Any]]:
    """Read all rows but a last line that is still being written. Raises ToolkitError."""
    return [*rows(path)]


def rows(path: Path, *, ended: bool = False) -> Iterator[dict[str, Any]]:
    """Yield what `read` returns, with few rows in memory. Raises ToolkitError.

    ended: nothing is written any more, so that a last line that is not whole is damage, too.
    """
    return (row for batch in Follower(path, ended=ended).batches() for row in batch)


def tail(path: Path) -> list[dict[str, Any]]:
    """Return the rows in the last 64 KiB of a file, however large it is; none where there is no file.

    Lines that are no rows, such as the end of one, are left out. Raises ToolkitError if it cannot be read.
    """
    if not path.exists():
        return []
    with os_errors("read"), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _BLOCK_BYTES))
        lines = file.read(_BLOCK_BYTES).splitlines(keepends=True)
    return [row for line in lines if (row := parse_row(line)) is not None]


class Follower:
    """Incremental reader of a growing file, or of one that has `ended`: each row once, from the first on."""

    def __init__(self, path: Path, *, ended: bool = False) -> None:
        self._path, self._offset, self._lines, self._ended = path, 0, 0, ended

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows appended since the last call, BATCH_ROWS at a time; the last batch may be empty.

        Raises ToolkitError if the file cannot be read or a whole line is not a row.
        """
        rows: list[dict[str, Any]] = []
        with os_errors("read"), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") and not self._ended:
                    break
                if (row := parse_row(line)) is None:
                    where = f"{self._path}:{self._lines + 1}"
                    raise ToolkitError(f"{where} is not a JSON object with a step", todo="remove the line")
                rows.append(row)
                self._offset, self._lines = self._offset + len(line), self._lines + 1
                if len(rows) == BATCH_ROWS:
                    yield rows
                    rows = []
        yield rows


def truncate_after(path: Path, step: int) -> int:
    """Drop the rows of later steps, and damaged lines, before a run resumes from `step`.

    Steps ascend in a file, so it is read backwards to the first row that stays; the lines before it are only
    checked for damage by a power cut. Atomic. Returns how many whole lines were dropped, 0 if there is no
    file. Raises ToolkitError if the file cannot be read or written.
    """
    if not path.exists():
        return 0
    with os_errors("write"):
        with path.open("r+b") as file:
            end, dropped, is_plain = _end_of(file, step)
            if is_plain and _is_undamaged(file, end):
                file.truncate(end)
                return dropped
            file.seek(0)
            lines = [(line, parse_row(line)) for line in file if line.endswith(b"\n")]
        kept = [line for line, row in lines if row is not None and row.get("step", step) <= step]
        atomic.write_bytes(path, b"".join(kept))
    return len(lines) - len(kept)


def _end_of(file: BinaryIO, step: int) -> tuple[int, int, bool]:
    """Return the end of the last row up to `step`, the number of whole lines after it, and if all go."""
    dropped = 0
    for offset, line in _backwards(file):
        row = parse_row(line)
        if row is not None and "step" not in row:
            return offset, dropped, False
        if row is not None and row["step"] <= step:
            return offset + len(line), dropped, True
        dropped += line.endswith(b"\n")
    return 0, dropped, True


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) from the last line to the first."""
    begin, rest = file.seek(0, os.SEEK_END), b""
    while begin:
        start = max(0, begin - _BLOCK_BYTES)
        file.seek(start)
        lines = io.BytesIO(file.read(begin - start) + rest).readlines()
        rest = lines.pop(0) if start else b""  # its beginning may be in the previous block
        offset, begin = start + len(rest) + sum(map(len, lines)), start
        for line in reversed(lines):
            offset -= len(line)
            yield offset, line


def _is_undamaged(file: BinaryIO, end: int) -> bool:
    """Return True if all lines before `end` begin and end like rows; parsing would be many times slower."""
    file.seek(0)
    before = b"}\n"
    while block := file.read(min(_BLOCK_BYTES, end - file.tell())):
        block = before + block
        is_line = block.endswith(b"\n")  # the rest of the line is in the next block
        if b"\0" in block or block.count(b"}\n{") != block.count(b"\n") - is_line:
            return False
        before = block[-2:] if is_line else block[-1:]
    return True


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a whole line; None if it is not a row."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step", 0), int | float) else None
