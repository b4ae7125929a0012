"""CIFAR-10 and CIFAR-100 in their binary versions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lib.data.datasets.catalogue import BINARY_SETS, BinarySet
from lib.data.datasets.cifar import records
from lib.data.datasets.files import Place, first_file
from lib.data.metadata import outlined, told
from lib.data.types import Dataset

_BESIDE_BYTES = 1 << 24  # in an archive, beside its records


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No symbols of its own."""


def outline(_: Options, place: Place) -> Dataset:
    """By the sizes of the files, or as published."""
    wanted = BINARY_SETS[place.name]
    sizes, where = (wanted.train_size, wanted.test_size), "as published"
    found = _find_binary(wanted, place.data_dir) if place.data_dir is not None else None
    if found is not None:
        train, test = (
            records.count_records(files, label_bytes=wanted.label_bytes) for files in (found[0], [found[1]])
        )
        sizes, where = (train, test), f"in {found[1].parent}"
    return outlined(wanted.spec, *sizes, f"{place.name}: {where}, {told(*sizes)}")


def open_set(_: Options, place: Place) -> Dataset:
    """The records, found or unpacked from the archive. Raises DataError where they are missing or damaged."""
    wanted, data_dir = BINARY_SETS[place.name], place.files
    found = _find_binary(wanted, data_dir)
    if found is None:
        archive = place.image_file(wanted.remote, f"{wanted.train[0]} with {wanted.test[0]}")
        folder = archive.parent
        # The test part last: until it is there the set does not count as found.
        count = wanted.train_size + wanted.test_size
        most_bytes = _BESIDE_BYTES + count * records.record_bytes(wanted.label_bytes)
        records.unpack(archive, folder, names=(*wanted.train, wanted.test[0]), most_bytes=most_bytes)
        found = _find_binary(wanted, data_dir)
        assert found is not None, "unpacked where it is looked for"
    train_files, test_file = found
    classes = wanted.spec.classes
    train = records.read_records(train_files, label_bytes=wanted.label_bytes, classes=classes)
    test = records.read_records([test_file], label_bytes=wanted.label_bytes, classes=classes)
    sizes = f"{_share(train.size, wanted.train_size)} + {_share(test.size, wanted.test_size)}"
    source = f"{wanted.spec.name}: {sizes} images from {test_file.parent}"
    return Dataset(wanted.spec, train, test, source)


def _share(size: int, whole: int) -> str:
    return f"{size} (of {whole})" if size < whole else str(size)


def _find_binary(wanted: BinarySet, data_dir: Path) -> tuple[list[Path], Path] | None:
    """The training files and the test file, from the first folder that has some of both."""
    for name in wanted.folders:
        folder = data_dir / name
        train = [folder / file for file in wanted.train if (folder / file).is_file()]
        test = first_file(folder / file for file in wanted.test)
        if train and test is not None:
            return train, test
    return None
