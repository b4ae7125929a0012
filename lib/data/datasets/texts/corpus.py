"""Texts in files, split into training and validation.

Published texts have a published split. Others are split into pieces by their hashes, so that adding a file
moves no other piece, and copies of a text are in the same part.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.data.cache import fingerprint
from lib.data.datasets.files import marks
from lib.errors import DataError, os_error, os_errors

# Not part of the library itself, or specific to the machine.
_EXCLUDED = frozenset(("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"))
_MACHINE_SPECIFIC = ("config-", "_sysconfigdata")
_PYTHON_ONE_IN = 20  # one of so many pieces is for validation
_FILES_ONE_IN = 10
_PIECE_BYTES = 1 << 14  # larger files are split at line ends
_PROBE_BYTES = 1 << 13  # a file with a zero byte at its beginning is not text


@dataclass(frozen=True, slots=True)
class Texts:
    """Contents of both parts. remark: for the user."""

    train: bytes
    validation: bytes
    remark: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts that are not read yet.

    location: for messages. identity: changes whenever a file does. read: raises DataError if there is too
    little text, ToolkitError if the disk fails.
    """

    location: str
    identity: str
    read: Callable[[], Texts]


def python_library(root: Path | None = None) -> Corpus:
    """Return the sources of Python's standard library, or of `root`, sorted by path.

    Without tests, IDLE, lib2to3 and installed packages. Raises DataError if there are no sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))

    def ours(name: str) -> bool:
        return name not in _EXCLUDED and not name.startswith(_MACHINE_SPECIFIC)

    files = [file for file in _walk(root, ours) if file.suffix == ".py" and ours(file.name)]
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {root}",
            todo="use another interpreter, or another data set such as CONFIG_DATASET_TEXT_FILES=y",
        )

    def read() -> Texts:
        train, validation = split_by_content([_content(file) for file in files], one_in=_PYTHON_ONE_IN)
        return Texts(train, validation, f"{len(files)} files under the licence of the PSF")

    location = f"the standard library of Python {platform.python_version()}"
    return Corpus(location, fingerprint("python_library", *marks(files)), read)


def text_files(root: Path, *, log: Callable[[str], None]) -> Corpus:
    """Return the file `root`, or all texts below it but hidden ones; `log` tells what is left out."""
    hidden = "."
    found = [root] if root.is_file() else _walk(root, lambda name: not name.startswith(hidden))
    files = [file for file in found if not file.name.startswith(hidden)]

    def read() -> Texts:
        contents = [_content(file) for file in files]
        texts = [content for content in contents if b"\0" not in content[:_PROBE_BYTES]]
        if len(texts) < len(contents):
            log(f"{root}: {len(contents) - len(texts)} files that are no text are left out")
        pieces = [piece for text in texts for piece in _pieces(text)]
        train, validation = split_by_content(pieces, one_in=_FILES_ONE_IN)
        return Texts(train, validation, f"{len(texts)} files")

    return Corpus(str(root), fingerprint("text_files", *marks(files)), read)


def one_file(file: Path, *, train_share: float) -> Corpus:
    """Return `file`, whose first `train_share` of characters is for training."""

    def read() -> Texts:
        content = _content(file)
        starts = np.flatnonzero(np.frombuffer(content, np.uint8) & 0xC0 != 0x80)  # of characters in UTF-8
        end = int(starts[int(train_share * len(starts))]) if len(starts) else 0
        return Texts(content[:end], content[end:], "")

    return Corpus(str(file), fingerprint("one_file", train_share, *marks([file])), read)


def two_files(train: Path, validation: Path, *, words: tuple[int, int]) -> Corpus:
    """Return a published split. words: words and line ends of the two complete files."""

    def read() -> Texts:
        contents = _content(train), _content(validation)
        counts = [
            f"{count}{'' if count == whole else f' (of {whole})'}"
            for count, whole in zip(map(_words, contents), words, strict=True)
        ]
        return Texts(*contents, f"{counts[0]} + {counts[1]} words")

    return Corpus(str(train.parent), fingerprint("two_files", *marks([train, validation])), read)


def split_by_content(pieces: Sequence[bytes], *, one_in: int) -> tuple[bytes, bytes]:
    """Join the pieces of both parts; about one in `one_in` is for validation.

    A piece is for validation if its SHA-256 is a multiple of one_in, or the lowest if none is. Raises
    DataError if fewer than two pieces differ.
    """
    hashes = [int.from_bytes(hashlib.sha256(piece).digest()) for piece in pieces]
    held = {number for number in hashes if number % one_in == 0} or {min(hashes, default=0)}
    if not set(hashes) - held:
        raise DataError(
            "there is too little text to hold some of it back for evaluation",
            why=f"{sum(map(len, pieces))} bytes in {len(pieces)} pieces",
        )
    numbered = list(zip(pieces, hashes, strict=True))
    train = b"".join(piece for piece, number in numbered if number not in held)
    return train, b"".join(piece for piece, number in numbered if number in held)


def _pieces(content: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(content):
        end = content.find(b"\n", start + _PIECE_BYTES) + 1 or len(content)
        yield content[start:end]
        start = end


def _walk(root: Path, enter: Callable[[str], bool]) -> list[Path]:
    """Return the files below `root`, in folders whose names `enter` accepts, sorted by path."""

    def fail(error: OSError) -> None:
        raise os_error("read", error) from error

    files: list[Path] = []
    for folder, names, here in os.walk(root, onerror=fail):
        names[:] = [name for name in names if enter(name)]
        files += [Path(folder, name) for name in here]
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _content(file: Path) -> bytes:
    with os_errors("read"):
        return file.read_bytes()


def _words(content: bytes) -> int:
    """Count words and line ends, as figures for WikiText do."""
    octets = np.frombuffer(content, np.uint8)
    space = np.append(np.isin(octets, np.frombuffer(b" \t\n\r\v\f", np.uint8)), True)
    return int((space[1:] & ~space[:-1]).sum() + (octets == ord("\n")).sum())
