"""MNIST and Fashion-MNIST: four idx files each, gzipped or not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lib.data.datasets.catalogue import IDX_FILES, IDX_SETS, MNIST_CONTENT, IdxSet
from lib.data.datasets.files import Place, damaged, first_file
from lib.data.datasets.mnist import idx
from lib.data.metadata import outlined, told
from lib.data.types import ArrayPart, Dataset
from lib.errors import DataError

PUBLISHED_SIZES = (60_000, 10_000)  # of MNIST and what copies its layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No symbols of its own."""


def outline(_: Options, place: Place) -> Dataset:
    """By the headers of the files, or as published. Raises DataError where a header is damaged."""
    wanted = IDX_SETS[place.name]
    sizes, where = PUBLISHED_SIZES, "as published"
    if place.data_dir is not None:
        folders = [place.data_dir / folder for folder in wanted.folders]
        files = [first_file(_spellings(folders, name)) for name in IDX_FILES]
        train, test = files[0], files[2]
        if train is not None and test is not None:
            sizes, where = (idx.count_samples(train), idx.count_samples(test)), f"in {train.parent}"
    return outlined(wanted.spec, *sizes, f"{place.name}: {where}, {told(*sizes)}")


def open_set(_: Options, place: Place) -> Dataset:
    """The four files, found or fetched. Raises DataError where one is missing, damaged or of MNIST itself."""
    wanted, data_dir = IDX_SETS[place.name], place.files
    spec = wanted.spec
    folders = [data_dir / folder for folder in wanted.folders]
    files = {
        name: first_file(_spellings(folders, name)) or place.image_file(remote)
        for name, remote in zip(IDX_FILES, wanted.remotes, strict=True)
    }
    contents = {name: idx.read_idx(file) for name, file in files.items()}
    published = _published_mnist(contents)
    if spec.name != "mnist" and any(published.values()):
        name = next(name for name, same in published.items() if same)
        raise DataError(
            f"{files[name]} is a file of MNIST",
            why=f"CONFIG_DATASET is {spec.name}",
            todo=f"put the files of {spec.name} into {data_dir / spec.name}",
        )
    train, test = (_idx_part(wanted, files, contents, *IDX_FILES[first : first + 2]) for first in (0, 2))
    content = ", content as published" if all(published.values()) else ""
    folder = files[IDX_FILES[0]].parent
    return Dataset(
        spec, train, test, f"{spec.name}: {train.size} + {test.size} images from {folder}{content}"
    )


def _idx_part(
    wanted: IdxSet,
    files: Mapping[str, Path],
    contents: Mapping[str, bytes],
    images_name: str,
    labels_name: str,
) -> ArrayPart:
    spec = wanted.spec
    images = idx.parse_images(contents[images_name], files[images_name], height=spec.height, width=spec.width)
    labels = idx.parse_labels(contents[labels_name], files[labels_name], classes=spec.classes)
    if len(images) != len(labels):
        raise damaged(
            files[labels_name], f"{len(labels)} labels for the {len(images)} images of {images_name}"
        )
    return ArrayPart(images, labels)


def _published_mnist(contents: Mapping[str, bytes]) -> dict[str, bool]:
    """For each file, whether it has the content that was published as MNIST."""
    return {
        name: hashlib.sha256(content).hexdigest() == MNIST_CONTENT[name] for name, content in contents.items()
    }


def _spellings(folders: Iterable[Path], name: str) -> Iterable[Path]:
    """Where an idx file may be: also spelled with a dot, gzipped or not."""
    for folder in folders:
        for spelling in (name, name.replace("-idx", ".idx")):
            yield folder / spelling
            yield folder / f"{spelling}.gz"
