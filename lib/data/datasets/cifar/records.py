"""The binary format of CIFAR-10 and CIFAR-100: records of label bytes and 3072 pixels, and nothing else."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lib import atomic
from lib.data.datasets.files import check_labels, damaged
from lib.data.types import ArrayPart
from lib.errors import os_error

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def read_records(files: Sequence[Path], *, label_bytes: int, classes: int) -> ArrayPart:
    """The samples of all `files` in their order. The last label byte counts (CIFAR-100: the fine one)."""
    records = [_read(file, label_bytes=label_bytes, classes=classes) for file in files]
    images = np.concatenate([record[:, label_bytes:] for record in records]).reshape(-1, *_SHAPE)
    labels = np.concatenate([record[:, label_bytes - 1] for record in records]).astype(np.int64)
    return ArrayPart(images, labels)


def record_bytes(label_bytes: int) -> int:
    """Bytes of one sample."""
    return label_bytes + _PIXELS


def count_records(files: Sequence[Path], *, label_bytes: int) -> int:
    """How many samples files of that size have."""
    return sum(file.stat().st_size for file in files) // record_bytes(label_bytes)


def unpack(archive: Path, folder: Path, *, names: Sequence[str], most_bytes: int) -> None:
    """Take the files `names`, in that order, out of a .tar.gz into `folder`. The archive is deleted then.

    most_bytes: that all of it may unpack to; no more is unpacked.
    """
    try:
        with _Bounded(archive, most_bytes) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
            members = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
            missing = [name for name in names if name not in members]
            if missing:
                raise damaged(archive, f"{', '.join(missing)} missing in it")
            for name in names:
                source = tar.extractfile(members[name])
                assert source is not None, "only regular files were kept"
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                atomic.write_bytes(file, source.read())
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, _TooLargeError) as error:
        raise damaged(archive, str(error)) from error
    except OSError as error:
        raise os_error("unpack", error) from error
    archive.unlink()


class _TooLargeError(Exception):
    """More would be unpacked than may be."""


class _Bounded(gzip.GzipFile):
    """A file that is unpacked as it is read, up to a bound: whoever goes beyond has a bomb before him."""

    def __init__(self, file: Path, most_bytes: int) -> None:
        super().__init__(file)
        self._most_bytes = most_bytes

    def read(self, size: int | None = -1) -> bytes:
        self._check(self.tell() + (size or 0))
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check(offset)
        return super().seek(offset, whence)

    def _check(self, end: int) -> None:
        if end > self._most_bytes:
            raise _TooLargeError(f"it would unpack to more than {self._most_bytes} bytes")


def _read(file: Path, *, label_bytes: int, classes: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    try:
        content = np.fromfile(file, np.uint8)
    except OSError as error:
        raise os_error("read", error) from error
    width = record_bytes(label_bytes)
    if not len(content) or len(content) % width:
        raise damaged(file, f"{len(content)} bytes are no whole number of records of {width}")
    records = content.reshape(-1, width)
    check_labels(records[:, label_bytes - 1], file, classes=classes)
    return records
