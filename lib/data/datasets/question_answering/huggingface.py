"""The package transformers, an extra, and models of it in local directories. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, DataError


def transformers() -> Any:
    """The package. Raises ConfigError where it is not installed."""
    try:
        import transformers as package
    except ImportError as error:
        raise ConfigError(
            "the package transformers is not installed",
            why=f"it is an extra, needed for a frozen model that is named hf:DIRECTORY ({error})",
            todo="install it, for example with .venv/bin/pip install transformers",
        ) from error
    package.utils.logging.disable_progress_bar()
    return package


class HuggingFaceTokenizer:
    """The tokenizer of the model in `folder`, without marks of its own."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError without the package, DataError where the folder has none."""
        package = transformers()
        if not folder.is_dir():  # transformers takes it for a name to be looked up on the network
            raise DataError(f"{folder} is no directory", todo="name another hf:DIRECTORY")
        try:
            self._tokenizer = package.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise not_there(folder, "tokenizer", error) from error

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def sizes(folder: Path) -> tuple[int, int]:
    """Tokens of the vocabulary and channels of the model in `folder`, as its config.json has them.

    Raises DataError where it does not say.
    """
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        width = known["hidden_size"] if "hidden_size" in known else known["n_embd"]
        return int(known["vocab_size"]), int(width)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise not_there(folder, "config.json with vocab_size and hidden_size", error) from error


def not_there(folder: Path, what: str, error: Exception) -> DataError:
    """A model that cannot be read, as one line."""
    why = " ".join(str(error).split())
    return DataError(f"{folder} has no {what} that can be read", why=why, todo="name another hf:DIRECTORY")
