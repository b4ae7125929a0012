"""Texts in files, split into training and validation.

Published texts have a published split. Others are split into pieces by their hashes, so that adding a file
moves no other piece, and copies of a text are in the same part.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.data.cache import fingerprint
from lib.data.datasets.user_files import marks
from lib.data.tokenizers import as_text
from lib.errors import DataError, os_error, os_errors
from lib.units import counted, some_of

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
    little text, or, made with `utf8`, if a file is no UTF-8; ToolkitError if the disk fails.
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
        pieces = [_content(file) for file in files]
        train, validation = split_by_content(pieces, one_in=_PYTHON_ONE_IN, place=f" in {root}")
        return Texts(train, validation, f"{len(files)} files under the licence of the PSF")

    location = f"the standard library of Python {platform.python_version()}"
    return Corpus(location, fingerprint("python_library", *marks(files)), read)


def text_files(root: Path, *, utf8: bool, log: Callable[[str], None]) -> Corpus:
    """Return the file `root`, or all texts below it but hidden ones; `log` tells what is left out."""
    hidden = "."
    found = [root] if root.is_file() else _walk(root, lambda name: not name.startswith(hidden))
    files = [file for file in found if not file.name.startswith(hidden)]

    def read() -> Texts:
        contents = {file: _content(file) for file in files}
        texts = {file: content for file, content in contents.items() if b"\0" not in content[:_PROBE_BYTES]}
        others = Counter(file.suffix or file.name for file in contents.keys() - texts.keys())
        kinds = some_of([f"{count} {kind}" for kind, count in sorted(others.items())])
        if others:
            log(f"{root}: files that are no text are left out: {kinds}")
        for file, content in texts.items() if utf8 else ():
            as_text(content, file, is_choice=True)
        pieces = [piece for text in texts.values() for piece in _pieces(text)]
        if not pieces:
            what = f"there is too little text in {root}: it has no file with text"
            raise DataError(what, why=f"it has {kinds}" if others else "", todo="put texts there")
        place = f" in {next(iter(texts)) if len(texts) == 1 else root}"
        train, validation = split_by_content(pieces, one_in=_FILES_ONE_IN, place=place)
        names = [file.name for file in texts]
        return Texts(train, validation, f"{counted(len(names), 'file')} ({some_of(names)})")

    return Corpus(str(root), fingerprint("text_files", *marks(files)), read)


def one_file(file: Path, *, train_share: float, utf8: bool) -> Corpus:
    """Return `file`, whose first `train_share` of characters is for training."""

    def read() -> Texts:
        content = _content(file, utf8=utf8)
        starts = np.flatnonzero(np.frombuffer(content, np.uint8) & 0xC0 != 0x80)  # of characters in UTF-8
        end = int(starts[int(train_share * len(starts))]) if len(starts) else 0
        return Texts(content[:end], content[end:], "")

    return Corpus(str(file), fingerprint("one_file", train_share, *marks([file])), read)


def two_files(train: Path, validation: Path, *, words: tuple[int, int], utf8: bool) -> Corpus:
    """Return a published split. words: words and line ends of the two complete files."""

    def read() -> Texts:
        contents = _content(train, utf8=utf8), _content(validation, utf8=utf8)
        counts = [
            f"{count}{'' if count == whole else f' (of {whole})'}"
            for count, whole in zip(map(_words, contents), words, strict=True)
        ]
        return Texts(*contents, f"{counts[0]} + {counts[1]} words")

    return Corpus(str(train.parent), fingerprint("two_files", *marks([train, validation])), read)


def split_by_content(pieces: Sequence[bytes], *, one_in: int, place: str = "") -> tuple[bytes, bytes]:
    """Join the pieces of both parts; about one in `one_in` is for validation.

    A piece is for validation if its SHA-256 is a multiple of one_in, or the lowest if none is. Raises
    DataError, with the `place` of the text, if fewer than two pieces differ.
    """
    hashes = [int.from_bytes(hashlib.sha256(piece).digest()) for piece in pieces]
    held = {number for number in hashes if number % one_in == 0} or {min(hashes, default=0)}
    if not set(hashes) - held:
        alike = " that are alike" * (len(pieces) > 1)
        why = f"{sum(map(len, pieces)):,} bytes in {counted(len(pieces), 'piece')}{alike}"
        todo = "add other texts"
        if any(len(piece) > _PIECE_BYTES for piece in pieces):
            why += f", which only the end of a line after {_PIECE_BYTES:,} bytes can cut"
            todo = "break long lines, for example with fold -s, or add other texts"
        what = f"there is too little text{place} to hold some of it back for evaluation"
        raise DataError(what, why=why, todo=todo)
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


def _content(file: Path, *, utf8: bool = False) -> bytes:
    """Return the bytes of a file. Raises DataError if they must be, and are not, UTF-8."""
    with os_errors("read"):
        content = file.read_bytes()
    if utf8:
        as_text(content, file, is_choice=True)
    return content


def _words(content: bytes) -> int:
    """Count words and line ends, as figures for WikiText do."""
    octets = np.frombuffer(content, np.uint8)
    space = np.append(np.isin(octets, np.frombuffer(b" \t\n\r\v\f", np.uint8)), True)
    return int((space[1:] & ~space[:-1]).sum() + (octets == ord("\n")).sum())
