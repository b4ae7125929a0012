"""Results as they come: one JSON object a line, on the disk before the next measurement begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class Rows:
    """Appends rows to a file. Each is written, flushed and synchronised before `add` returns."""

    def __init__(self, path: Path, *, part: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._part = part

    def add(self, kind: str, **values: Any) -> None:
        """Append a row, and show it."""
        line = json.dumps({"part": self._part, "kind": kind, **values})
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        print(line, flush=True)

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
