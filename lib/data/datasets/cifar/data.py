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
)
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec
from lib.errors import os_error, os_errors
from lib.plugins import NoOptions as Options

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def record_bytes(label_bytes: int) -> int:
    """Return the bytes of one sample."""
    return label_bytes + _PIXELS


def unpack(archive: Path, folder: Path, *, names: Sequence[str], max_bytes: int) -> None:
    """Extract the files `names`, in that order, from a .tar.gz into `folder`, and delete the archive.

    max_bytes: bound of the unpacked size. Raises DataError for a damaged archive, ToolkitError for the disk.
    """
    try:
        with gzip.open(archive) as opened:
            content = opened.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise damaged(archive, f"it would unpack to more than {max_bytes} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
            missing = [name for name in names if name not in members]
            if missing:
                raise damaged(archive, f"{', '.join(missing)} missing in it")
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                source = tar.extractfile(members[name])
                assert source is not None, "only regular files were kept"
                atomic.write_bytes(folder / name, source.read())
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(archive, str(error)) from error
    except OSError as error:
        raise os_error("unpack", error) from error
    archive.unlink()


PUBLISHED_SIZES = (50_000, 10_000)  # of the complete parts
_BESIDE_BYTES = 1 << 24  # in an archive, beside its records


@dataclass(frozen=True, slots=True)
class BinarySet:
    """A data set in the binary format of CIFAR."""

    spec: ImageSpec
    folders: tuple[str, ...]
    train: tuple[str, ...]  # training files, any of which suffice
    test: tuple[str, ...]  # test files, of which the first present is used
    label_bytes: int  # of a record; the last one counts (in CIFAR-100 the fine label)
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
    found = _find(known, location.data_dir) if location.data_dir is not None else None
    if found is None:
        return describe_images(known.spec, PUBLISHED_SIZES, "as published")
    train, test = (
        sum(file.stat().st_size for file in files) // record_bytes(known.label_bytes) for files in found
    )
    return describe_images(known.spec, (train, test), f"in {found[1][0].parent}")


def open_set(_: Options, location: DataLocation) -> Dataset:
    """Open the records, unpacked from the archive if necessary. Raises DataError if missing or damaged."""
    known, data_dir = BINARY_SETS[location.name], location.files
    found = _find(known, data_dir)
    if found is None:
        archive = location.find_image_file(known.remote, f"{known.train[0]} with {known.test[0]}")
        # The test part last, because without it the set counts as missing.
        max_bytes = _BESIDE_BYTES + sum(PUBLISHED_SIZES) * record_bytes(known.label_bytes)
        unpack(archive, archive.parent, names=(*known.train, known.test[0]), max_bytes=max_bytes)
        found = _find(known, data_dir)
        assert found is not None, "unpacked where it is looked for"
    train, test = (_read_part(known, files) for files in found)
    sizes = [
        f"{part.size} (of {whole})" if part.size < whole else str(part.size)
        for part, whole in zip((train, test), PUBLISHED_SIZES, strict=True)
    ]
    source = f"{known.spec.name}: {sizes[0]} + {sizes[1]} images from {found[1][0].parent}"
    return Dataset(known.spec, train, test, source)


def _find(known: BinarySet, data_dir: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the training files and the test file from the first folder that has both."""
    for name in known.folders:
        folder = data_dir / name
        train = [folder / file for file in known.train if (folder / file).is_file()]
        test = first_file(folder / file for file in known.test)
        if train and test is not None:
            return train, [test]
    return None


def _read_part(known: BinarySet, files: Sequence[Path]) -> ArrayPart:
    records = np.concatenate([_read(file, known) for file in files])
    images = np.ascontiguousarray(records[:, known.label_bytes :]).reshape(-1, *_SHAPE)
    return ArrayPart(images, records[:, known.label_bytes - 1].astype(np.int64))


def _read(file: Path, known: BinarySet) -> Images:
    """Read the records of one file, (N, record_bytes)."""
    with os_errors("read"):
        content = np.fromfile(file, np.uint8)
    width = record_bytes(known.label_bytes)
    if not len(content) or len(content) % width:
        raise damaged(file, f"{len(content)} bytes are no whole number of records of {width}")
    records = content.reshape(-1, width)
    check_labels(records[:, known.label_bytes - 1], file, classes=known.spec.classes)
    return records
