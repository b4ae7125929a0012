"""JSON Lines: a file with one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, os_errors


def read_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place (file:line) and the object of every line that is not blank.

    Raises ConfigError, with the place, for a missing file and for a line that is no JSON object in UTF-8.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is not there", todo="name a file of JSON objects, one on each line")
    with os_errors("read"):
        lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        place = f"{file}:{number}"
        try:
            read = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise ConfigError(f"{place} is no JSON object", why=str(error)) from error
        if not isinstance(read, dict) and line.strip():
            raise ConfigError(f"{place} is no JSON object", why=f"it is {type(read).__name__}")
        if read is not None:
            yield place, read
