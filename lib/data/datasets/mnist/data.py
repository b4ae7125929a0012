"""MNIST and Fashion-MNIST: four idx files each, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.data.datasets.files import (
    DataLocation,
    Remote,
    check_labels,
    damaged,
    describe_images,
    first_file,
    format_sizes,
)
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec, Labels
from lib.errors import DataError, os_error
from lib.plugins import NoOptions as Options

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTES = 0x08
_LONGEST_HEADER = 16  # of a file with three dimensions
LARGEST_BYTES = 2**30  # unpacked; twenty times MNIST


def read_idx(file: Path, *, limit: int | None = None) -> bytes:
    """Read an idx file, gzipped (by its magic number) or not.

    At most one byte more than the header promises is unpacked, and never more than LARGEST_BYTES. limit:
    bytes to read, for the header.
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
                return start + unpacked.read(_promised(start, file) + 1 - len(start))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(file, f"not a complete gzip file ({error})") from error
    except OSError as error:
        raise os_error("read", error) from error


def count_samples(file: Path) -> int:
    """Return the number of samples in the header of an idx file."""
    return int(_shape(read_idx(file, limit=_LONGEST_HEADER), file)[0])


def parse_images(content: bytes, file: Path, *, height: int, width: int) -> Images:
    """Parse images into uint8 (N, 1, height, width) without a copy. `file` is for messages."""
    array = _parse(content, file, dimensions=3)
    if array.shape[1:] != (height, width):
        raise damaged(file, f"images of {array.shape[1]}x{array.shape[2]} pixels, {height}x{width} expected")
    return array[:, None]


def parse_labels(content: bytes, file: Path, *, classes: int) -> Labels:
    """Parse labels into int64 (N,), each below `classes`."""
    labels = _parse(content, file, dimensions=1)
    check_labels(labels, file, classes=classes)
    return labels.astype(np.int64)


def _shape(content: bytes, file: Path) -> tuple[int, ...]:
    """Return the shape in the header."""
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


PUBLISHED_SIZES = (60_000, 10_000)  # of MNIST and Fashion-MNIST
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True, slots=True)
class IdxSet:
    """A data set in four idx files, each gzipped or not."""

    spec: ImageSpec
    folders: tuple[str, ...]  # below DATA_DIR, in search order
    remotes: tuple[Remote, ...]


_MNIST = (
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
)
_FASHION = ("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",)

# SHA-256 of the unpacked files, compared with those of two independent sources.
MNIST_CONTENT = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def _idx_remotes(folders: tuple[str, ...], *hashes: str) -> tuple[Remote, ...]:
    return tuple(
        Remote(f"{name}.gz", sha256, folders) for name, sha256 in zip(IDX_FILES, hashes, strict=True)
    )


IDX_SETS = {
    "mnist": IdxSet(
        ImageSpec.square("mnist", 28, 10, mean=(0.1307,), std=(0.3081,)),
        ("mnist", "", "MNIST/raw"),
        _idx_remotes(
            _MNIST,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion_mnist": IdxSet(
        ImageSpec.square("fashion_mnist", 28, 10, mean=(0.2860,), std=(0.3530,)),
        ("fashion_mnist", "", "FashionMNIST/raw"),
        _idx_remotes(
            _FASHION,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
}


def describe(_: Options, location: DataLocation) -> Dataset:
    """Return the metadata from the headers of the files, or as published. Raises DataError."""
    known = IDX_SETS[location.name]
    sizes, where = PUBLISHED_SIZES, "as published"
    if location.data_dir is not None:
        folders = [location.data_dir / folder for folder in known.folders]
        files = [first_file(_spellings(folders, name)) for name in IDX_FILES]
        train, test = files[0], files[2]
        if train is not None and test is not None:
            sizes, where = (count_samples(train), count_samples(test)), f"in {train.parent}"
    return describe_images(known.spec, *sizes, f"{location.name}: {where}, {format_sizes(*sizes)}")


def open_set(_: Options, location: DataLocation) -> Dataset:
    """Open the four files, downloaded if missing.

    Raises DataError for missing, damaged or MNIST's own files.
    """
    known, data_dir = IDX_SETS[location.name], location.files
    spec = known.spec
    folders = [data_dir / folder for folder in known.folders]
    files = {
        name: first_file(_spellings(folders, name)) or location.find_image_file(remote)
        for name, remote in zip(IDX_FILES, known.remotes, strict=True)
    }
    contents = {name: read_idx(file) for name, file in files.items()}
    published = _published_mnist(contents)
    if spec.name != "mnist" and any(published.values()):
        name = next(name for name, same in published.items() if same)
        raise DataError(
            f"{files[name]} is a file of MNIST",
            why=f"CONFIG_DATASET is {spec.name}",
            todo=f"put the files of {spec.name} into {data_dir / spec.name}",
        )
    train, test = (_idx_part(spec, files, contents, *IDX_FILES[first : first + 2]) for first in (0, 2))
    content = ", content as published" if all(published.values()) else ""
    folder = files[IDX_FILES[0]].parent
    return Dataset(
        spec, train, test, f"{spec.name}: {train.size} + {test.size} images from {folder}{content}"
    )


def _idx_part(
    spec: ImageSpec,
    files: Mapping[str, Path],
    contents: Mapping[str, bytes],
    images_name: str,
    labels_name: str,
) -> ArrayPart:
    images = parse_images(contents[images_name], files[images_name], height=spec.height, width=spec.width)
    labels = parse_labels(contents[labels_name], files[labels_name], classes=spec.classes)
    if len(images) != len(labels):
        raise damaged(
            files[labels_name], f"{len(labels)} labels for the {len(images)} images of {images_name}"
        )
    return ArrayPart(images, labels)


def _published_mnist(contents: Mapping[str, bytes]) -> dict[str, bool]:
    """Return for each file whether its content is that of MNIST."""
    return {
        name: hashlib.sha256(content).hexdigest() == MNIST_CONTENT[name] for name, content in contents.items()
    }


def _spellings(folders: Iterable[Path], name: str) -> Iterable[Path]:
    """Yield the paths that an idx file may have: also spelled with a dot, gzipped or not."""
    for folder in folders:
        for spelling in (name, name.replace("-idx", ".idx")):
            yield folder / spelling
            yield folder / f"{spelling}.gz"
