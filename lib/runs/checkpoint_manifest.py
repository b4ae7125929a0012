"""Checkpoint manifests: step, and size and SHA-256 of every file and of the manifest itself."""

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
    """The reason why a checkpoint cannot be used."""


def encode(content: Mapping[str, Any]) -> bytes:
    """Serialize a manifest, with its own checksum, to bytes."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def decode(data: bytes, *, step: int) -> dict[str, Any]:
    """Parse the manifest of `step`. Raises DamagedError if it belongs to another step or a byte differs."""
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
    """Return True if it was the best so far when saved; False for older manifests without this field."""
    return bool(content.get("best", False))


def verify(directory: Path, *, step: int) -> None:
    """Verify the files of the checkpoint in `directory` against its manifest.

    Raises DamagedError if a file differs, OSError if one cannot be read.
    """
    for name, expected in decode((directory / NAME).read_bytes(), step=step)["files"].items():
        path = directory / name
        found_bytes = path.stat().st_size
        if found_bytes != expected["size_bytes"]:
            raise DamagedError(f"{path.name} has {found_bytes} bytes, not {expected['size_bytes']}")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise DamagedError(f"the SHA-256 of {path.name} differs")
