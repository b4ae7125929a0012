"""Cache of measurements for later runs: one file, with an entry per configuration and machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ToolkitError, os_error
from lib.plan.probing import Probed


@dataclass(frozen=True, slots=True)
class Kept:
    """A measurement, and when it was made (a date and time in UTC)."""

    probed: Probed
    made: str


def cache_file() -> Path:
    """Path of this user's cache of measurements."""
    return Path.home() / ".cache" / "anneal" / "probe.json"


def key_of(facts: Mapping[str, Any]) -> str:
    """Return the cache key for `facts`, which must hold everything that the result depends on."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(canonical.encode()).hexdigest()


def load(file: Path, key: str) -> Kept | None:
    """Return the entry of `key`, or None if there is none or it cannot be read."""
    entry = _read(file).get(key)
    if entry is None:
        return None
    try:
        return Kept(Probed.from_json(entry["probed"]), entry["made"])
    except (KeyError, TypeError):  # written by another version
        return None


def store(file: Path, key: str, kept: Kept, *, facts: Mapping[str, Any]) -> None:
    """Store a measurement. Raises ToolkitError if it cannot be written."""
    entries = _read(file)
    entries[key] = {"made": kept.made, "probed": kept.probed.to_json(), "facts": dict(facts)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps(entries, indent=1, default=list) + "\n")
    except OSError as error:
        raise os_error(f"keep the measurement in {file}", error) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise os_error(f"read the measurements in {file}", error) from error
    except ValueError as error:
        raise ToolkitError(
            f"{file} is damaged", why=str(error), todo="remove it; make probe measures again"
        ) from error
    return entries if isinstance(entries, dict) else {}
