"""Texts in files: what is trained on, and what is held back from it for evaluation, always the same.

Published texts have a published split. Others are cut into pieces, and a piece is for evaluation
if its hash says so: adding a file moves no other, and copies of a text are on the same side.
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
from lib.errors import DataError, os_error

# Not of the library itself, or different on each machine (what it was built with).
_LEFT_OUT = frozenset(("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"))
_OF_THE_MACHINE = ("config-", "_sysconfigdata")
_PYTHON_ONE_IN = 20  # pieces for one that is evaluated on
_FILES_ONE_IN = 10
_PIECE_BYTES = 1 << 14  # larger files are cut at the end of a line
_LOOKED_AT_BYTES = 1 << 13  # a file with a zero byte in its beginning is no text


@dataclass(frozen=True, slots=True)
class Texts:
    """What was read. remark: what the user should know of it."""

    train: bytes
    validation: bytes
    remark: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts that are there and not read yet.

    place:    where they are, in words.
    identity: all that their content follows from; it changes whenever a file does.
    read:     raises DataError where there is too little, ToolkitError where the disk fails.
    """

    place: str
    identity: str
    read: Callable[[], Texts]


def python_library(root: Path | None = None) -> Corpus:
    """The sources of the running Python's standard library, in the order of their paths.

    Without tests, IDLE, lib2to3 and installed packages. root: where it is, if not where Python says.
    Raises DataError where this Python came without sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))

    def ours(name: str) -> bool:
        return name not in _LEFT_OUT and not name.startswith(_OF_THE_MACHINE)

    files = [file for file in _walk(root, ours) if file.suffix == ".py" and ours(file.name)]
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {root}",
            todo="use another interpreter, or another data set such as CONFIG_DATASET_TEXT_FILES=y",
        )

    def read() -> Texts:
        train, validation = split_by_content([_content(file) for file in files], one_in=_PYTHON_ONE_IN)
        return Texts(train, validation, f"{len(files)} files under the licence of the PSF")

    place = f"the standard library of Python {platform.python_version()}"
    return Corpus(place, fingerprint("python_library", *marks(files)), read)


def text_files(root: Path, *, say: Callable[[str], None]) -> Corpus:
    """The file `root`, or all texts in the folder `root` and below it in the order of their paths.

    Hidden files are left out, and, which `say` is told, what does not look like text.
    """
    hidden = "."
    found = [root] if root.is_file() else _walk(root, lambda name: not name.startswith(hidden))
    files = [file for file in found if not file.name.startswith(hidden)]

    def read() -> Texts:
        contents = [_content(file) for file in files]
        texts = [content for content in contents if b"\0" not in content[:_LOOKED_AT_BYTES]]
        if len(texts) < len(contents):
            say(f"{root}: {len(contents) - len(texts)} files that are no text are left out")
        pieces = [piece for text in texts for piece in _pieces(text)]
        train, validation = split_by_content(pieces, one_in=_FILES_ONE_IN)
        return Texts(train, validation, f"{len(texts)} files")

    return Corpus(str(root), fingerprint("text_files", *marks(files)), read)


def one_file(file: Path, *, train_share: float) -> Corpus:
    """`file`, whose first `train_share`, counted in characters, is trained on."""

    def read() -> Texts:
        content = _content(file)
        starts = np.flatnonzero(np.frombuffer(content, np.uint8) & 0xC0 != 0x80)  # of characters in UTF-8
        end = int(starts[int(train_share * len(starts))]) if len(starts) else 0
        return Texts(content[:end], content[end:], "")

    return Corpus(str(file), fingerprint("one_file", train_share, *marks([file])), read)


def two_files(train: Path, validation: Path, *, words: tuple[int, int]) -> Corpus:
    """A published split. words: how many words and ends of lines the two files have if they are whole."""

    def read() -> Texts:
        contents = _content(train), _content(validation)
        counts = [
            f"{count}{'' if count == whole else f' (of {whole})'}"
            for count, whole in zip(map(_words, contents), words, strict=True)
        ]
        return Texts(*contents, f"{counts[0]} + {counts[1]} words")

    return Corpus(str(train.parent), fingerprint("two_files", *marks([train, validation])), read)


def split_by_content(pieces: Sequence[bytes], *, one_in: int) -> tuple[bytes, bytes]:
    """The pieces to train on and, about one in `one_in`, those to evaluate on, joined in their order.

    A piece is for evaluation if its SHA-256 is a multiple of one_in; where none is, the lowest one.
    Raises DataError where fewer than two pieces differ.
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
    """The files in `root` and in the folders below it whose names `enter` accepts, by their paths."""

    def fail(error: OSError) -> None:
        raise os_error("read", error) from error

    files: list[Path] = []
    for folder, names, here in os.walk(root, onerror=fail):
        names[:] = [name for name in names if enter(name)]
        files += [Path(folder, name) for name in here]
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise os_error("read", error) from error


def _words(content: bytes) -> int:
    """Words between white space, and ends of lines, which count as words in figures for WikiText."""
    octets = np.frombuffer(content, np.uint8)
    space = np.append(np.isin(octets, np.frombuffer(b" \t\n\r\v\f", np.uint8)), True)
    return int((space[1:] & ~space[:-1]).sum() + (octets == ord("\n")).sum())
