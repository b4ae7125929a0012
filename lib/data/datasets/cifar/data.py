"""CIFAR-10 and CIFAR-100 in their binary versions."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib import atomic
from lib.data.datasets.files import (
    DataLocation,
    Remote,
    check_labels,
    damaged,
    describe_images,
    first_file,
    format_sizes,
)
from lib.data.types import ArrayPart, Dataset, ImageSpec
from lib.errors import os_error
from lib.plugins import NoOptions as Options

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def read_records(files: Sequence[Path], *, label_bytes: int, classes: int) -> ArrayPart:
    """Read the samples of all `files`. The last label byte counts (in CIFAR-100 the fine label)."""
    records = [_read(file, label_bytes=label_bytes, classes=classes) for file in files]
    images = np.concatenate([record[:, label_bytes:] for record in records]).reshape(-1, *_SHAPE)
    labels = np.concatenate([record[:, label_bytes - 1] for record in records]).astype(np.int64)
    return ArrayPart(images, labels)


def record_bytes(label_bytes: int) -> int:
    """Return the bytes of one sample."""
    return label_bytes + _PIXELS


def count_records(files: Sequence[Path], *, label_bytes: int) -> int:
    """Return the number of samples by the sizes of the files."""
    return sum(file.stat().st_size for file in files) // record_bytes(label_bytes)


def unpack(archive: Path, folder: Path, *, names: Sequence[str], max_bytes: int) -> None:
    """Extract the files `names`, in that order, from a .tar.gz into `folder`, and delete the archive.

    max_bytes: bound of the unpacked size. Raises DataError for a damaged archive, ToolkitError for the disk.
    """
    try:
        with _Bounded(archive, max_bytes) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
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
    """The archive unpacks to more than its bound."""


class _Bounded(gzip.GzipFile):
    """A gzip file that is unpacked up to a bound, against decompression bombs."""

    def __init__(self, file: Path, max_bytes: int) -> None:
        super().__init__(file)
        self._max_bytes = max_bytes

    def read(self, size: int | None = -1) -> bytes:
        self._check(self.tell() + (size or 0))
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check(offset)
        return super().seek(offset, whence)

    def _check(self, end: int) -> None:
        if end > self._max_bytes:
            raise _TooLargeError(f"it would unpack to more than {self._max_bytes} bytes")


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


_BESIDE_BYTES = 1 << 24  # in an archive, beside its records


@dataclass(frozen=True, slots=True)
class BinarySet:
    """A data set in the binary format of CIFAR."""

    spec: ImageSpec
    folders: tuple[str, ...]
    train: tuple[str, ...]  # training files, any of which suffice
    test: tuple[str, ...]  # test files, of which the first present is used
    label_bytes: int
    train_size: int  # of the complete training part
    test_size: int
    remote: Remote


_CIFAR = ("https://www.cs.toronto.edu/~kriz",)
_CIFAR10_MORE = ("https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets",)

BINARY_SETS = {
    "cifar10": BinarySet(
        ImageSpec.square("cifar10", 32, 10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616)),
        ("cifar10", "cifar10/cifar-10-batches-bin", "", "cifar-10-batches-bin"),
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        ("test_batch.bin", "test_first1000.bin"),  # the second is a part, and reported as one
        1,
        50_000,
        10_000,
        Remote(
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            _CIFAR + _CIFAR10_MORE,
        ),
    ),
    "cifar100": BinarySet(
        ImageSpec.square("cifar100", 32, 100, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
        ("cifar100", "cifar100/cifar-100-binary", "", "cifar-100-binary"),
        ("train.bin",),
        ("test.bin",),
        2,
        50_000,
        10_000,
        Remote(
            "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            _CIFAR,
        ),
    ),
}


def describe(_: Options, location: DataLocation) -> Dataset:
    """Return the metadata from the sizes of the files, or as published."""
    known = BINARY_SETS[location.name]
    sizes, where = (known.train_size, known.test_size), "as published"
    found = _find_binary(known, location.data_dir) if location.data_dir is not None else None
    if found is not None:
        train, test = (
            count_records(files, label_bytes=known.label_bytes) for files in (found[0], [found[1]])
        )
        sizes, where = (train, test), f"in {found[1].parent}"
    return describe_images(known.spec, *sizes, f"{location.name}: {where}, {format_sizes(*sizes)}")


def open_set(_: Options, location: DataLocation) -> Dataset:
    """Open the records, unpacked from the archive if necessary. Raises DataError if missing or damaged."""
    known, data_dir = BINARY_SETS[location.name], location.files
    found = _find_binary(known, data_dir)
    if found is None:
        archive = location.find_image_file(known.remote, f"{known.train[0]} with {known.test[0]}")
        folder = archive.parent
        # The test part last, because without it the set counts as missing.
        count = known.train_size + known.test_size
        max_bytes = _BESIDE_BYTES + count * record_bytes(known.label_bytes)
        unpack(archive, folder, names=(*known.train, known.test[0]), max_bytes=max_bytes)
        found = _find_binary(known, data_dir)
        assert found is not None, "unpacked where it is looked for"
    train_files, test_file = found
    classes = known.spec.classes
    train = read_records(train_files, label_bytes=known.label_bytes, classes=classes)
    test = read_records([test_file], label_bytes=known.label_bytes, classes=classes)
    sizes = f"{_share(train.size, known.train_size)} + {_share(test.size, known.test_size)}"
    source = f"{known.spec.name}: {sizes} images from {test_file.parent}"
    return Dataset(known.spec, train, test, source)


def _share(size: int, whole: int) -> str:
    return f"{size} (of {whole})" if size < whole else str(size)


def _find_binary(known: BinarySet, data_dir: Path) -> tuple[list[Path], Path] | None:
    """Return the training files and the test file from the first folder that has both."""
    for name in known.folders:
        folder = data_dir / name
        train = [folder / file for file in known.train if (folder / file).is_file()]
        test = first_file(folder / file for file in known.test)
        if train and test is not None:
            return train, test
    return None
