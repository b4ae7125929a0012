"""JSON Lines: a file with one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lib.data.subset import held_out_by_hash
from lib.errors import ConfigError, os_errors

T = TypeVar("T")


def training_and_validation(
    read: Callable[[str], list[T]],
    file: str,
    *,
    other: str | None,
    percent: int | None,
    key: Callable[[T], str],
) -> tuple[list[T], list[T]]:
    """Return the samples of `file` for training, and those of file `other`, or else `percent` of the former.

    read: all of a file. key: the content of a sample, whose hash decides. Raises ConfigError if a part is
    empty, and what `read` does.
    """
    train, test = read(file), list[T]()
    if other is not None:
        test = read(other)
    else:
        assert percent is not None
        held_out = held_out_by_hash(map(key, train), percent)
        parts = [[each for each, own in zip(train, held_out, strict=True) if own == part] for part in (0, 1)]
        train, test = parts
    for part, samples in (("training", train), ("validation", test)):
        if not samples:
            raise ConfigError(f"{file}: no text is left for {part}", todo="add some")
    return train, test


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
