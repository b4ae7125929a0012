"""CIFAR-10 and CIFAR-100 in their binary versions."""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lib import atomic
from lib.data.datasets.files import DataLocation, check_labels, damaged, describe_images, first_file
from lib.data.datasets.published import Remote, read_published, remotes_of
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec
from lib.errors import os_error, os_errors
from lib.plugins import NoOptions as Options

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32


def record_bytes(label_bytes: int) -> int:
    """Return the bytes of one sample."""
    return label_bytes + _PIXELS


def unpack(archive: Path, folder: Path, *, names: Sequence[str], max_bytes: int) -> None:
    """Extract `names`, in that order, from a .tar.gz of at most `max_bytes`, and delete the archive.

    Raises DataError for a damaged archive, ToolkitError for the disk.
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
    """A data set in the binary format of CIFAR, with fields as in published.toml."""

    spec: ImageSpec
    folders: tuple[str, ...]
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int
    remote: Remote


def _binary_set(name: str, known: Mapping[str, Any]) -> BinarySet:
    mean, std = tuple(known["mean"]), tuple(known["std"])
    spec = ImageSpec.square(name, 32, known["classes"], mean=mean, std=std)
    folders, train, test = (tuple(known[field]) for field in ("folders", "train", "test"))
    (remote,) = remotes_of(known)
    return BinarySet(spec, folders, train, test, known["label_bytes"], remote)


BINARY_SETS = {
    name: _binary_set(name, known) for name, known in read_published(Path(__file__).parent).items()
}


def describe(_: Options, location: DataLocation) -> Dataset:
    """Return the metadata from the sizes of the files, or as published. Raises DataError for odd sizes."""
    known = BINARY_SETS[location.name]
    found = _find(known, location.data_dir) if location.data_dir is not None else None
    if found is None:
        return describe_images(known.spec, PUBLISHED_SIZES, "as published")
    train, test = (sum(_records(file, file.stat().st_size, known) for file in files) for files in found)
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
    records = content.reshape(_records(file, len(content), known), -1)
    check_labels(records[:, known.label_bytes - 1], file, classes=known.spec.classes)
    return records


def _records(file: Path, size_bytes: int, known: BinarySet) -> int:
    """Return the number of records in `file`. Raises DataError if it is damaged."""
    width = record_bytes(known.label_bytes)
    if not size_bytes or size_bytes % width:
        raise damaged(file, f"{size_bytes} bytes are no whole number of records of {width}")
    return size_bytes // width
