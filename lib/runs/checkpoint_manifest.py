"""What a checkpoint says of itself: its step, and size and SHA-256 of every file, this text included."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1
NAME = "manifest.json"
STATE = "state.pt"  # the file that every checkpoint has


class DamagedError(Exception):
    """Why a checkpoint cannot be used."""


def encode(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def decode(data: bytes, *, step: int) -> dict[str, Any]:
    """The content of the manifest of `step`. Raises DamagedError where it is another's or a byte differs."""
    try:
        content: dict[str, Any] = json.loads(data)
        content.pop("sha256")
        sound = data == encode(content)
    except (ValueError, TypeError, AttributeError, KeyError):
        sound = False
    if not sound:
        raise DamagedError(f"{NAME} is not as it was written")
    if content.get("format") != FORMAT:
        raise DamagedError(f"its format is {content.get('format')}, this version reads {FORMAT}")
    if content.get("step") != step:
        raise DamagedError(f"it is the checkpoint of step {content.get('step')}")
    if not _lists_files(content.get("files")):
        raise DamagedError(f"{NAME} does not give size and SHA-256 of {STATE}")
    return content


def _lists_files(files: object) -> bool:
    return (
        isinstance(files, dict)
        and STATE in files
        and all(isinstance(file, dict) and {"size_bytes", "sha256"} <= set(file) for file in files.values())
    )


def is_best(content: Mapping[str, Any]) -> bool:
    """Whether it was the best so far when it was saved; those of before this was noted were not."""
    return bool(content.get("best", False))


def verify(directory: Path, *, step: int) -> None:
    """Raises DamagedError where a file of the checkpoint in `directory` is not as it was written.

    Raises OSError where one cannot be read.
    """
    for name, expected in decode((directory / NAME).read_bytes(), step=step)["files"].items():
        path = directory / name
        found_bytes = path.stat().st_size
        if found_bytes != expected["size_bytes"]:
            raise DamagedError(f"{path.name} has {found_bytes} bytes, not {expected['size_bytes']}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise DamagedError(f"the SHA-256 of {path.name} differs")
