"""JSON Lines: a file with one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lib.data.datasets.user_files import check_there
from lib.data.file_kinds import check_is_text
from lib.data.sampler import held_out_by_hash
from lib.errors import ConfigError, DataError, close_to, os_errors, raise_faults

T = TypeVar("T")
_TWICE = "it has a key twice"
_WRITE = 'write {"key": "value", ...} on a line of its own, or remove it'


def training_and_validation(
    read: Callable[[Path], list[T]],
    file: Path,
    *,
    other: Path | None,
    percent: int | None,
    key: Callable[[T], str],
    prefix: str,
) -> tuple[list[T], list[T]]:
    """Return the samples of `file` for training, and those of file `other`, or else `percent` of the former.

    read: all of a file. key: the content of a sample, whose hash decides. prefix: of the options' symbols.
    Raises DataError if a file is missing or a part empty, and what `read` does.
    """
    for symbol, each in ("FILE", file), ("VALIDATION_FILE", other):
        if each is not None:
            check_there(each, f"{prefix}_{symbol}", ".jsonl")
    train, test = read(file), list[T]()
    todo = "add some"
    if other is not None:
        test = read(other)
    else:
        assert percent is not None
        if train:
            todo = f"add others than these {len(train)}, or set CONFIG_{prefix}_VALIDATION_OTHER=y"
        held_out = held_out_by_hash(map(key, train), percent)
        parts = [[each for each, own in zip(train, held_out, strict=True) if own == part] for part in (0, 1)]
        train, test = parts
    for part, samples, source in (("training", train, file), ("validation", test, other or file)):
        if not samples:
            raise DataError(f"{source}: no text is left for {part}", todo=todo)
    return train, test


def named(file: Path) -> str:
    """Return the name of a file with the SHA-256 of its content."""
    with os_errors("read"), file.open("rb") as opened:
        return f"{file}, SHA-256 {hashlib.file_digest(opened, 'sha256').hexdigest()[:16]}"


def read_objects(
    file: Path, parse: Callable[[str, dict[str, Any]], T], *, content: bytes | None = None
) -> list[T]:
    """Return what `parse` makes of the place (file:line) and the object of every line that is not blank.

    content: that of `file`, where it is no file. Raises ConfigError for one that is not UTF-8, and with all
    lines that are no JSON object, have a key twice, or for which `parse` raises one.
    """
    if content is None:
        with os_errors("read"):
            content = file.read_bytes()
    check_is_text(content, file, wanted="JSON Lines")
    lines = content.split(b"\n")
    parsed, faults = list[T](), list[str]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            read = json_of(line)
            if not isinstance(read, dict):
                why = f"it is {type(read).__name__}"
                raise ConfigError(f"{place} is no JSON object", why=why, todo=_WRITE)
            parsed.append(parse(place, read))
        except UnicodeDecodeError as error:  # of the file, of which each line would be a symptom
            what = f"{place} is not UTF-8: byte {error.start} of the line is {line[error.start]:#04x}"
            raise DataError(what, todo="save the file as UTF-8") from error
        except ValueError as error:
            faults.append(f"{place} is no JSON object: {error}; {remedy(error, _WRITE)}")
        except ConfigError as error:
            faults.append(str(error))
    raise_faults(f"{len(faults)} of {len(faults) + len(parsed)} lines cannot be used", faults)
    return parsed


def json_of(line: str | bytes) -> Any:
    """Return what a line holds. Raises ValueError for what is no JSON, has a key twice or is no text."""
    try:
        read = json.loads(line, object_pairs_hook=_object)
        json.dumps(read, ensure_ascii=False).encode()  # half a surrogate pair is no text for a tokenizer
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return read


def remedy(error: ValueError, rewrite: str) -> str:
    """Return what to do about an error of `json_of`: `rewrite`, unless more is known."""
    if isinstance(error, UnicodeEncodeError):
        return r"write the character whole: \ud83d\ude00 is one, and \ud83d half of it"
    return "name each once" if str(error).startswith(_TWICE) else rewrite


def value_of(place: str, read: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key` in an object. Raises ConfigError without it, with the keys that are there."""
    if key not in read:
        why = f"its keys are {', '.join(read)}" if read else "it is empty"
        close = close_to(key, read)
        raise ConfigError(
            f'{place} has no "{key}"', why=why, todo=f"rename {close[0]} to {key}" if close else "give it one"
        )
    return read[key]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"{_TWICE}; its keys are {', '.join(name for name, _ in pairs)}")
    return found
