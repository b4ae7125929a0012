"""The idx format of MNIST and Fashion-MNIST, gzipped or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from lib.data.datasets.files import check_labels, damaged
from lib.data.types import Images, Labels
from lib.errors import os_error

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTES = 0x08
_LONGEST_HEADER = 16  # of three dimensions
LARGEST_BYTES = 2**30  # unpacked; twenty times MNIST, and more than any set in its layout has


def read_idx(file: Path, *, most: int | None = None) -> bytes:
    """The content of an idx file, unpacked if it is gzipped (told by its first bytes, not its name).

    Of what is gzipped no more is unpacked than its header promises and a byte, and nothing where that is more
    than LARGEST_BYTES. most: bytes to read, for a look at the beginning.
    """
    try:
        with file.open("rb") as opened:
            if opened.read(2) != _GZIP_MAGIC:
                opened.seek(0)
                return opened.read(-1 if most is None else most)
            opened.seek(0)
            with gzip.open(opened) as unpacked:
                if most is not None:
                    return unpacked.read(most)
                start = unpacked.read(_LONGEST_HEADER)
                return start + unpacked.read(_promised(start, file) + 1 - len(start))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(file, f"not a complete gzip file ({error})") from error
    except OSError as error:
        raise os_error("read", error) from error


def count_samples(file: Path) -> int:
    """How many samples the header of an idx file promises."""
    return int(_shape(read_idx(file, most=_LONGEST_HEADER), file)[0])


def parse_images(content: bytes, file: Path, *, height: int, width: int) -> Images:
    """uint8 (N, 1, height, width), without a copy. `file` is for messages."""
    array = _parse(content, file, dimensions=3)
    if array.shape[1:] != (height, width):
        raise damaged(file, f"images of {array.shape[1]}x{array.shape[2]} pixels, {height}x{width} expected")
    return array[:, None]


def parse_labels(content: bytes, file: Path, *, classes: int) -> Labels:
    """int64 (N,), each below `classes`."""
    labels = _parse(content, file, dimensions=1)
    check_labels(labels, file, classes=classes)
    return labels.astype(np.int64)


def _shape(content: bytes, file: Path) -> tuple[int, ...]:
    """The extents that the header names."""
    dimensions = content[3] if content[:3] == bytes((0, 0, _UNSIGNED_BYTES)) and len(content) > 3 else 0
    if dimensions not in (1, 3):
        raise damaged(
            file,
            f"begins with {content[:4].hex() or 'nothing'}, an idx file with 00000803 (images) or 00000801",
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise damaged(file, f"{len(content)} bytes are less than the header of {header}")
    return tuple(int(extent) for extent in np.frombuffer(content, ">u4", dimensions, offset=4))


def _promised(start: bytes, file: Path) -> int:
    shape = _shape(start, file)
    size_bytes = 4 + 4 * len(shape) + math.prod(shape)
    if size_bytes > LARGEST_BYTES:
        raise damaged(file, f"it would unpack to {size_bytes} bytes, and at most {LARGEST_BYTES} are read")
    return size_bytes


def _parse(content: bytes, file: Path, *, dimensions: int) -> Images:
    magic = bytes((0, 0, _UNSIGNED_BYTES, dimensions))
    if content[:4] != magic:
        raise damaged(
            file, f"begins with {content[:4].hex() or 'nothing'}, an idx file of this kind with {magic.hex()}"
        )
    shape = _shape(content, file)
    header = 4 + 4 * dimensions
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise damaged(file, f"{len(content)} bytes, its header promises {expected}")
    if not shape[0]:
        raise damaged(file, "it holds no samples")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
