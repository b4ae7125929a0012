"""Published data sets: the files of each and where they are downloaded from, by its published.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to download: its name, its SHA-256, and the URLs of the folders that have it."""

    file: str
    sha256: str
    folders: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the file, in the order they are tried."""
        return tuple(f"{folder}/{self.file}" for folder in self.folders)


def read_published(folder: Path) -> dict[str, Any]:
    """Read published.toml in the folder of a data-set plug-in: facts about its published sets."""
    return tomllib.loads((folder / "published.toml").read_text(encoding="utf-8"))


def remotes_of(known: Mapping[str, Any]) -> tuple[Remote, ...]:
    """Return the files of a published set by their names and SHA-256; each of its URLs has all."""
    return tuple(Remote(file, sha256, tuple(known["urls"])) for file, sha256 in known["files"].items())
