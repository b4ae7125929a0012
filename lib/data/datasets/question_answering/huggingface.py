"""Facts about local models of Hugging Face transformers, an optional package."""

from __future__ import annotations

import json
from pathlib import Path

from lib.errors import DataError


def sizes(folder: Path) -> tuple[int, int]:
    """Return vocabulary size and width by the config.json in `folder`. Raises DataError without them."""
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        width = known["hidden_size"] if "hidden_size" in known else known["n_embd"]
        return int(known["vocab_size"]), int(width)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise missing_error(folder, "config.json with vocab_size and hidden_size", error) from error


def missing_error(folder: Path, what: str, error: Exception) -> DataError:
    """Return the error for a model that cannot be read."""
    why = " ".join(str(error).split())
    return DataError(f"{folder} has no {what} that can be read", why=why, todo="name another hf:DIRECTORY")
