"""Local models and tokenizers of Hugging Face transformers, an optional package. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, DataError


def transformers() -> Any:
    """Return the package. Raises ConfigError if it is not installed."""
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
    """Tokenizer of the model in `folder`, without special tokens."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError without the package, DataError if the folder has none."""
        package = transformers()
        if not folder.is_dir():  # otherwise transformers takes it for a name on the Hub
            raise DataError(f"{folder} is not a directory", todo="name another hf:DIRECTORY")
        try:
            self._tokenizer = package.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise missing_error(folder, "tokenizer", error) from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


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
