"""Byte and character tokenizers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lib.data.types import Tokens, Unit
from lib.errors import DataError

_SHOWN = 5  # characters named in a message


def narrowest(vocab_size: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """Return the narrowest unsigned type for ids below vocab_size."""
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def as_text(content: bytes) -> str:
    """Decode UTF-8. Raises DataError if `content` is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"the text is not UTF-8: byte {error.start} is {content[error.start]:#04x}",
            todo="convert it, or set CONFIG_TOKENIZER_BYTE=y, which takes any bytes",
        ) from error


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8."""

    name = "byte"
    unit: Unit = "byte"
    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text.encode())

    def encode_all(self, content: bytes) -> Tokens:
        """Encode a whole file."""
        return np.frombuffer(content, np.uint8)

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Decode tokens."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return the bytes per token id."""
        return np.ones(self.vocab_size, np.int64)


class CharTokenizer:
    """Tokenizer whose ids are positions in `characters`, which are sorted."""

    name = "char"
    unit: Unit = "char"

    def __init__(self, characters: str) -> None:
        self.characters, self.vocab_size = characters, len(characters)
        self._codes = _codes(characters)
        assert (np.diff(self._codes.astype(np.int64)) > 0).all(), "characters rise"

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Raises DataError for an unknown character."""
        ids: list[int] = self._ids(text).tolist()
        return ids

    def encode_all(self, content: bytes) -> Tokens:
        """Encode a whole file."""
        return self._ids(as_text(content))

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Decode tokens."""
        return "".join(self.characters[token] for token in np.asarray(tokens).tolist())

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return the bytes per token id."""
        return np.array([len(character.encode()) for character in self.characters], np.int64)

    def _ids(self, text: str) -> Tokens:
        codes = _codes(text)
        places = np.searchsorted(self._codes, codes)
        known = np.append(self._codes, 0)[places] == codes  # 0 for codes beyond the last
        if not known.all():
            unknown = [chr(code) for code in np.unique(codes[~known])]
            raise DataError(
                f"characters that the vocabulary lacks: {', '.join(map(repr, unknown[:_SHOWN]))}",
                why=f"it has the {self.vocab_size} of the data",
            )
        ids: Tokens = places.astype(narrowest(self.vocab_size))
        return ids


def _codes(text: str) -> npt.NDArray[Any]:
    """Return the code points of `text`, (N,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
