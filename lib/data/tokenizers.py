"""Tokenizers: bytes, characters and byte pairs, GPT-2's (Radford et al. 2019) or learned from texts.

For byte pairs a text is first split into words (`pieces`) by a pattern of Unicode letters, numbers and white
space. Then byte pairs of each word are merged in the order in which they were learned.
"""

from __future__ import annotations

import heapq
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lib.data.datasets.files import damaged
from lib.data.types import Tokenizer, Tokens, Unit
from lib.errors import DataError, os_errors

END_OF_TEXT = "<|endoftext|>"

# Unicode White_Space; Python's \s also matches U+001C to U+001F.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_CHUNK = 1 << 20  # characters split into words at a time
_LARGEST_CACHE = 1 << 20  # words whose ids are kept
_SHOWN = 5  # characters named in a message as unknown
_MOST_SHOWN = 100  # characters named as known

Pair = tuple[bytes, bytes]


def narrowest(vocab_size: int) -> type[np.uint8] | type[np.uint16] | type[np.uint32]:
    """Return the narrowest unsigned type for ids below vocab_size."""
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def as_text(content: bytes, file: Path | None = None, *, is_choice: bool = False) -> str:
    """Decode UTF-8. Raises DataError if `content` is not UTF-8.

    file: whose it is, if only text will do, or, if that `is_choice`, the tokenizer's.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        what = f"{file or 'the text'} is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        bytes_do = "" if file and not is_choice else ", or set CONFIG_TOKENIZER_BYTE=y, which takes any bytes"
        raise DataError(what, todo=f"convert it{bytes_do}") from error


def as_lines(content: bytes, file: Path | None = None) -> list[str]:
    """Return the lines of UTF-8 that may begin with a byte order mark. Raises what `as_text` does.

    They end at \\n or \\r\\n alone: `str.splitlines` cuts at other characters, such as U+2028 in a sentence.
    """
    lines = as_text(content, file).removeprefix("\ufeff").split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


class ByteTokenizer:
    """Tokenizer whose tokens are the bytes of UTF-8."""

    name = "byte"
    unit: Unit = "byte"
    vocab_size = 256
    end = 0xFF  # a byte that no text has

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

    def to_json(self) -> dict[str, Any]:
        """Return its name."""
        return {"name": self.name}


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

    def to_json(self) -> dict[str, Any]:
        """Return its name and characters."""
        return {"name": self.name, "characters": self.characters}

    def _some(self) -> str:
        """Return the characters for a message, but for white space; few of very many."""
        found = "".join(self.characters.split())
        return found if len(found) <= _MOST_SHOWN else f"{found[:_MOST_SHOWN]}..."

    def _ids(self, text: str) -> Tokens:
        codes = _codes(text)
        places = np.searchsorted(self._codes, codes)
        known = np.append(self._codes, 0)[places] == codes  # 0 for codes beyond the last
        if not known.all():
            unknown = [chr(code) for code in np.unique(codes[~known])]
            raise DataError(
                f"characters that the vocabulary lacks: {', '.join(map(repr, unknown[:_SHOWN]))}",
                why=f"it has the {self.vocab_size} of the data: {self._some()}",
                todo="leave them out, or train with CONFIG_TOKENIZER_BYTE=y, which takes any text",
            )
        ids: Tokens = places.astype(narrowest(self.vocab_size))
        return ids


def _codes(text: str) -> npt.NDArray[Any]:
    """Return the code points of `text`, (N,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


class GPT2Tokenizer:
    """Byte-pair tokenizer with `ids` of byte strings and `merges` in the order learned."""

    name = "gpt2"
    unit: Unit = "token"

    def __init__(self, ids: dict[bytes, int], merges: list[Pair], *, end: int | None) -> None:
        """end: id of END_OF_TEXT, which encoding never produces; None if there is none."""
        self.end = end
        self.vocab_size = len(ids) + (end is not None)
        self._ids = ids
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._bytes = {number: content for content, number in ids.items()}
        self._word_ids = lru_cache(maxsize=_LARGEST_CACHE)(self.merged)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return list(chain.from_iterable(map(self._word_ids, pieces(text))))

    def encode_all(self, content: bytes) -> Tokens:
        """Encode a UTF-8 file, at about two megabytes per second."""
        text, dtype = as_text(content), narrowest(self.vocab_size)
        rows = [np.array(self.encode(chunk), dtype) for chunk in _chunks(text)]
        ids: Tokens = np.concatenate(rows) if rows else np.empty(0, dtype)
        return ids

    def decode(self, tokens: npt.ArrayLike) -> str:
        """Decode tokens; invalid UTF-8 becomes the replacement character."""
        mark = {self.end: END_OF_TEXT.encode()}
        parts = (self._bytes.get(token) or mark[token] for token in np.asarray(tokens).tolist())
        return b"".join(parts).decode(errors="replace")

    def byte_lengths(self) -> npt.NDArray[np.int64]:
        """Return the bytes per token id; 0 for END_OF_TEXT."""
        return np.array([len(self._bytes.get(number, b"")) for number in range(self.vocab_size)], np.int64)

    def to_json(self) -> dict[str, Any]:
        """Return its ids and merges, spelled as in the published files."""
        spelling = _spelling()

        def spelled(content: bytes) -> str:
            return "".join(spelling[byte] for byte in content)

        ids = {spelled(content): number for content, number in self._ids.items()}
        merges = [f"{spelled(left)} {spelled(right)}" for left, right in self._ranks]
        return {"name": self.name, "ids": ids, "merges": merges, "end": self.end}

    def merged(self, text: str) -> tuple[int, ...]:
        """Return the ids of one word in time n log n; words such as lines of dashes are long."""
        word = text.encode("utf-8", "surrogatepass")
        parts: list[bytes | None] = [word[place : place + 1] for place in range(len(word))]
        after = list(range(1, len(parts) + 1))  # index of the next part
        before = list(range(-1, len(parts) - 1))
        pairs = enumerate(pairwise(parts))
        heap = [(self._ranks[pair], place, pair) for place, pair in pairs if pair in self._ranks]
        heapq.heapify(heap)
        while heap:
            _, place, (left, right) = heapq.heappop(heap)
            following = after[place]
            if parts[place] != left or following >= len(parts) or parts[following] != right:
                continue  # one of the two is already merged
            parts[place], parts[following] = left + right, None
            after[place] = after[following]
            if after[place] < len(parts):
                before[after[place]] = place
            for first in (before[place], place):
                if first >= 0 and after[first] < len(parts):
                    pair = (parts[first], parts[after[first]])
                    if pair in self._ranks:
                        heapq.heappush(heap, (self._ranks[pair], first, pair))
        return tuple(self._ids[part] for part in parts if part is not None)


def load_gpt2(encoder: Path, merges: Path) -> GPT2Tokenizer:
    """Read the published files encoder.json (text of a token -> id) and vocab.bpe (a merge per line).

    Raises DataError if they are damaged or inconsistent, ToolkitError if they cannot be read.
    """
    try:
        with os_errors("read"):
            spelled = json.loads(encoder.read_text(encoding="utf-8"))
            lines = merges.read_text(encoding="utf-8").splitlines()
        end = spelled.pop(END_OF_TEXT, None)
        ids, learned = _unspelled(
            spelled, [line for line in lines if line and not line.startswith("#version")]
        )
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise damaged(encoder, f"it or {merges.name} is not as published ({error})") from error
    made = {bytes((byte,)) for byte in range(256)} | {left + right for left, right in learned}
    numbers = sorted(ids.values()) + ([] if end is None else [end])
    if not made <= ids.keys() or sorted(numbers) != list(range(len(numbers))):
        raise damaged(encoder, f"its tokens are not those that {merges.name} makes")
    return GPT2Tokenizer(ids, learned, end=end)


def _unspelled(spelled: Mapping[str, int], lines: Iterable[str]) -> tuple[dict[bytes, int], list[Pair]]:
    """Return ids and merges from their published spelling. Raises KeyError or ValueError."""
    octets = {character: byte for byte, character in _spelling().items()}

    def content(token: str) -> bytes:
        return bytes(octets[character] for character in token)

    ids = {content(token): int(number) for token, number in spelled.items()}
    return ids, [(content(left), content(right)) for left, right in (line.split(" ") for line in lines)]


def tokenizer_from_json(content: Mapping[str, Any]) -> Tokenizer:
    """Make a tokenizer from its `to_json`. Raises KeyError or ValueError where that is malformed."""
    if content["name"] == "huggingface":
        from lib.data.huggingface_tokenizer import HuggingFaceTokenizer  # needs an extra

        return HuggingFaceTokenizer(Path(content["folder"]))
    if content["name"] == "gpt2":
        return GPT2Tokenizer(*_unspelled(content["ids"], content["merges"]), end=content["end"])
    return CharTokenizer(content["characters"]) if content["name"] == "char" else ByteTokenizer()


def pieces(text: str) -> list[str]:
    """Split a text into words as GPT-2 does.

    Words are ends of contractions; letters, numbers or other characters, each with one preceding space; and
    white space, whose last space belongs to the next word.
    """
    return _pattern().findall(text)


def _chunks(text: str) -> Iterator[str]:
    """Split `text` before white space, where no word continues."""
    boundary = re.compile(f"[^{_SPACE}](?=[{_SPACE}])")
    start = 0
    while start < len(text):
        found = boundary.search(text, start + _CHUNK)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    categories = "".join(unicodedata.category(chr(code))[0] for code in range(sys.maxunicode + 1))
    letters, numbers = (_class(categories, kind) for kind in "LN")
    return re.compile(
        "'s|'t|'re|'ve|'m|'ll|'d"
        f"| ?[{letters}]+| ?[{numbers}]+| ?[^{_SPACE}{letters}{numbers}]+"
        f"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )


def _class(categories: str, kind: str) -> str:
    """Return the code points of general category `kind` as ranges of a character class."""
    runs = (run.span() for run in re.finditer(f"{kind}+", categories))
    return "".join(f"\\U{start:08x}-\\U{end - 1:08x}" for start, end in runs)


def _spelling() -> dict[int, str]:
    """Return the character that represents each byte in encoder.json and vocab.bpe.

    Printable Latin-1 characters represent themselves, other bytes U+0100 and up.
    """
    printable = [byte for first, last in ("!~", "¡¬", "®ÿ") for byte in range(ord(first), ord(last) + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


def learned(texts: Iterable[str], *, merges: int) -> GPT2Tokenizer:
    """Learn at most `merges` merges of the most frequent pair, ties by bytes (Sennrich et al. 2016)."""
    counts = Counter(word.encode() for text in texts for word in pieces(text))
    words = [([bytes((byte,)) for byte in word], count) for word, count in sorted(counts.items())]
    found: list[Pair] = []
    for _ in range(merges):
        frequency: Counter[Pair] = Counter()
        for parts, count in words:
            for pair in pairwise(parts):
                frequency[pair] += count
        if not frequency:
            break
        best = min(frequency, key=lambda pair: (-frequency[pair], pair))
        found.append(best)
        words = [(_merged(parts, best), count) for parts, count in words]
    ids = {bytes((byte,)): byte for byte in range(256)}
    for left, right in found:
        ids.setdefault(left + right, len(ids))  # two pairs may yield the same bytes
    return GPT2Tokenizer(ids, found, end=None)


def _merged(parts: list[bytes], pair: Pair) -> list[bytes]:
    made: list[bytes] = []
    place = 0
    while place < len(parts):
        if tuple(parts[place : place + 2]) == pair:
            made.append(pair[0] + pair[1])
            place += 2
        else:
            made.append(parts[place])
            place += 1
    return made
