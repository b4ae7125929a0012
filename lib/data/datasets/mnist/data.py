"""MNIST and Fashion-MNIST: four idx files each, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.data.datasets.files import DataLocation, check_labels, damaged, describe_images, first_file
from lib.data.datasets.published import Remote, read_published, remotes_of
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec
from lib.errors import DataError, os_error
from lib.plugins import NoOptions as Options

_GZIP_MAGIC = b"\x1f\x8b"
_IMAGES, _LABELS = "00000803", "00000801"  # magic numbers: bytes in three dimensions, or in one
_LONGEST_HEADER = 16  # of a file with three dimensions
LARGEST_BYTES = 2**30  # unpacked; twenty times MNIST


def read_idx(file: Path, *, limit: int | None = None) -> bytes:
    """Read an idx file, gzipped (by its magic number) or not; `limit` bytes, for the header, or all.

    At most one byte more than the header promises is unpacked, and never more than LARGEST_BYTES.
    """
    try:
        with file.open("rb") as opened:
            if opened.read(2) != _GZIP_MAGIC:
                opened.seek(0)
                return opened.read(-1 if limit is None else limit)
            opened.seek(0)
            with gzip.open(opened) as unpacked:
                if limit is not None:
                    return unpacked.read(limit)
                start = unpacked.read(_LONGEST_HEADER)
                size = _promised_bytes(_shape(start, file))
                if size > LARGEST_BYTES:
                    why = f"it would unpack to {size} bytes, and at most {LARGEST_BYTES} are read"
                    raise damaged(file, why)
                return start + unpacked.read(size + 1 - len(start))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(file, f"not a complete gzip file ({error})") from error
    except OSError as error:
        raise os_error("read", error) from error


def count_samples(file: Path) -> int:
    """Return the number of samples in the header of an idx file."""
    return int(_shape(read_idx(file, limit=_LONGEST_HEADER), file)[0])


def parse_images(content: bytes, file: Path, *, height: int, width: int) -> Images:
    """Parse images into uint8 (N, 1, height, width) without a copy. `file` is for messages."""
    array = _parse(content, file, magic=_IMAGES)
    if array.shape[1:] != (height, width):
        raise damaged(file, f"images of {array.shape[1]}x{array.shape[2]} pixels, {height}x{width} expected")
    return array[:, None]


def _shape(content: bytes, file: Path) -> tuple[int, ...]:
    """Return the shape in the header."""
    start = content[:4].hex()
    dimensions = {_IMAGES: 3, _LABELS: 1}.get(start)
    if dimensions is None:
        expected = f"an idx file with {_IMAGES} (images) or {_LABELS}"
        raise damaged(file, f"begins with {start or 'nothing'}, {expected}")
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise damaged(file, f"{len(content)} bytes are less than the header of {header}")
    shape = tuple(int(extent) for extent in np.frombuffer(content, ">u4", dimensions, offset=4))
    if not shape[0]:
        raise damaged(file, "it holds no samples")
    return shape


def _promised_bytes(shape: tuple[int, ...]) -> int:
    return 4 + 4 * len(shape) + math.prod(shape)


def _parse(content: bytes, file: Path, *, magic: str) -> Images:
    start = content[:4].hex()
    if start != magic:
        raise damaged(file, f"begins with {start or 'nothing'}, an idx file of this kind with {magic}")
    shape = _shape(content, file)
    if len(content) != _promised_bytes(shape):
        raise damaged(file, f"{len(content)} bytes, its header promises {_promised_bytes(shape)}")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


PUBLISHED_SIZES = (60_000, 10_000)  # of MNIST and Fashion-MNIST


@dataclass(frozen=True, slots=True)
class IdxSet:
    """A data set in four idx files, each gzipped or not."""

    spec: ImageSpec
    folders: tuple[str, ...]  # below DATA_DIR, in search order
    remotes: tuple[Remote, ...]


_PUBLISHED = read_published(Path(__file__).parent)
MNIST_CONTENT = _PUBLISHED.pop("mnist_content")  # SHA-256 of the unpacked files
IDX_FILES = tuple(MNIST_CONTENT)  # images and labels of the training part, then those of the test part
IDX_SETS = {
    name: IdxSet(
        ImageSpec.square(name, 28, 10, mean=tuple(known["mean"]), std=tuple(known["std"])),
        tuple(known["folders"]),
        remotes_of(known),
    )
    for name, known in _PUBLISHED.items()
}


def describe(_: Options, location: DataLocation) -> Dataset:
    """Return the metadata from the headers of the files, or as published. Raises DataError."""
    known = IDX_SETS[location.name]
    where, sizes = "as published", [*PUBLISHED_SIZES]
    for part, first in enumerate((0, 2)):
        file = _find(known, location.data_dir, IDX_FILES[first]) if location.data_dir is not None else None
        if file is not None:  # a file that is missing is downloaded alone
            where, sizes[part] = f"in {file.parent}", count_samples(file)
    return describe_images(known.spec, (sizes[0], sizes[1]), where)


def open_set(_: Options, location: DataLocation) -> Dataset:
    """Open the four files, downloaded if missing. Raises DataError for damaged or MNIST's own files."""
    known, data_dir = IDX_SETS[location.name], location.files
    spec = known.spec
    files = [
        _find(known, data_dir, name) or location.find_image_file(remote)
        for name, remote in zip(IDX_FILES, known.remotes, strict=True)
    ]
    contents = [read_idx(file) for file in files]
    hashes = (hashlib.sha256(content).hexdigest() for content in contents)
    are_mnist = [MNIST_CONTENT[name] == sha256 for name, sha256 in zip(IDX_FILES, hashes, strict=True)]
    if spec.name != "mnist" and any(are_mnist):
        raise DataError(
            f"{files[are_mnist.index(True)]} is a file of MNIST",
            why=f"CONFIG_DATASET is {spec.name}",
            todo=f"put the files of {spec.name} into {data_dir / spec.name}",
        )
    train, test = (_part(spec, files, contents, first) for first in (0, 2))
    content = ", content as published" if all(are_mnist) else ""
    source = f"{spec.name}: {train.size} + {test.size} images from {files[0].parent}{content}"
    return Dataset(spec, train, test, source)


def _part(spec: ImageSpec, files: list[Path], contents: list[bytes], first: int) -> ArrayPart:
    """Return the part whose images are in file number `first`, and whose labels are in the next one."""
    images = parse_images(contents[first], files[first], height=spec.height, width=spec.width)
    labels = _parse(contents[first + 1], files[first + 1], magic=_LABELS)
    check_labels(labels, files[first + 1], classes=spec.classes)
    if len(images) != len(labels):
        why = f"{len(labels)} labels for the {len(images)} images of {IDX_FILES[first]}"
        raise damaged(files[first + 1], why)
    return ArrayPart(images, labels.astype(np.int64))


def _find(known: IdxSet, data_dir: Path, name: str) -> Path | None:
    """Return an idx file, which may also be spelled with a dot, gzipped or not; None without one."""
    folders = [data_dir / folder for folder in known.folders]
    spellings = (name, f"{name}.gz", (dotted := name.replace("-idx", ".idx")), f"{dotted}.gz")
    return first_file(folder / spelling for folder in folders for spelling in spellings)
