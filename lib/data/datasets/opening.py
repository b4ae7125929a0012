"""Open a data set by name: find its files, or download them, or generate it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lib.data.datasets import cifar, mnist
from lib.data.datasets.catalogue import (
    BINARY_SETS,
    IDX_FILES,
    IDX_SETS,
    MNIST_CONTENT,
    BinarySet,
    IdxSet,
    Remote,
)
from lib.data.datasets.embedded import NAMES as EMBEDDED
from lib.data.datasets.embedded import open_embedded
from lib.data.datasets.files import find_or_fetch, first_file
from lib.data.datasets.question_answering.opening import NAMES as ANSWERS
from lib.data.datasets.question_answering.opening import AnswerOptions, open_answers
from lib.data.datasets.sudoku.opening import NAMES as PUZZLES
from lib.data.datasets.sudoku.opening import SudokuOptions, open_csv, open_sudoku
from lib.data.datasets.text_files import NAMES as TEXTS
from lib.data.datasets.text_files import Place, TextOptions, open_text
from lib.data.types import ArrayPart, Dataset
from lib.errors import DataError

_BESIDE_BYTES = 1 << 24  # in an archive, beside its records

NAMES = (*EMBEDDED, *IDX_SETS, *BINARY_SETS, "image_folder", *PUZZLES, *TEXTS, *ANSWERS)


def open_dataset(
    name: str,
    *,
    data_dir: Path | None,
    cache_dir: Path,
    download: bool,
    say: Callable[[str], None],
    image_size: int = 0,
    skip_bad: bool = False,
    text: TextOptions | None = None,
    sudoku: SudokuOptions | None = None,
    answers: AnswerOptions | None = None,
) -> Dataset:
    """Open the data set `name` (one of NAMES).

    Files are looked for in `data_dir` (None will do for an embedded set) and in a folder of the set's
    name in it, and fetched to the latter if they are missing and `download` is true. What is generated or
    packed is kept in `cache_dir`. image_size, skip_bad: for image_folder only.
    text: for sets of text only. sudoku: for puzzles that are generated. answers: for
    questions. `say` gets lines for the user; a download shows on standard output how far it is. Raises
    DataError where the set is missing or damaged, ConfigError where a text is too short, more puzzles are
    asked for than there are or a language model is not known, ToolkitError where the disk fails.
    """
    if name in EMBEDDED:
        return open_embedded(name, cache_dir=cache_dir, say=say)
    if name in TEXTS:
        assert text is not None
        place = Place(data_dir=data_dir, cache_dir=cache_dir, download=download, say=say)
        return open_text(name, text, place)
    if name in ANSWERS:
        assert answers is not None
        return open_answers(name, answers, data_dir=data_dir, say=say)
    if name == "sudoku":
        assert sudoku is not None
        return open_sudoku(sudoku, cache_dir=cache_dir, say=say)
    assert data_dir is not None, f"{name} is made of files"
    if name == "sudoku_csv":
        return open_csv(data_dir)
    if name == "image_folder":
        from lib.data.datasets.image_folder import open_folder

        return open_folder(data_dir, cache_dir=cache_dir, image_size=image_size, skip_bad=skip_bad, say=say)

    instead = "an embedded set (CONFIG_DATASET_DIGITS=y or CONFIG_DATASET_SCENES=y)"

    def get(remote: Remote, looked_for: str = "") -> Path:
        return find_or_fetch(
            remote,
            data_dir / name,
            name=f"data set {name}",
            download=download,
            instead=instead,
            say=say,
            looked_for=looked_for,
        )

    if name in IDX_SETS:
        return _open_idx(IDX_SETS[name], data_dir, get)
    return _open_binary(BINARY_SETS[name], data_dir, get)


def sizes_on_disk(name: str, data_dir: Path) -> tuple[int, int, Path] | None:
    """Training and test samples of a published set of images, and its folder; None where it is not there.

    Of the files nothing but sizes and headers is read. Raises DataError where one of those is damaged.
    """
    if name in IDX_SETS:
        folders = [data_dir / folder for folder in IDX_SETS[name].folders]
        files = [first_file(_spellings(folders, idx_file)) for idx_file in IDX_FILES]
        train, test = files[0], files[2]
        if train is None or test is None:
            return None
        return mnist.count_samples(train), mnist.count_samples(test), train.parent
    wanted = BINARY_SETS[name]
    found = _find_binary(wanted, data_dir)
    if found is None:
        return None
    counts = [cifar.count_records(files, label_bytes=wanted.label_bytes) for files in (found[0], [found[1]])]
    return counts[0], counts[1], found[1].parent


def _open_idx(wanted: IdxSet, data_dir: Path, get: Callable[[Remote], Path]) -> Dataset:
    spec = wanted.spec
    folders = [data_dir / folder for folder in wanted.folders]
    files = {
        name: first_file(_spellings(folders, name)) or get(remote)
        for name, remote in zip(IDX_FILES, wanted.remotes, strict=True)
    }
    contents = {name: mnist.read_idx(file) for name, file in files.items()}
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
    images = mnist.parse_images(
        contents[images_name], files[images_name], height=spec.height, width=spec.width
    )
    labels = mnist.parse_labels(contents[labels_name], files[labels_name], classes=spec.classes)
    if len(images) != len(labels):
        raise mnist.damaged(
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


def _open_binary(wanted: BinarySet, data_dir: Path, get: Callable[[Remote, str], Path]) -> Dataset:
    found = _find_binary(wanted, data_dir)
    if found is None:
        archive = get(wanted.remote, f"{wanted.train[0]} with {wanted.test[0]}")
        folder = archive.parent
        # The test part last: until it is there the set does not count as found.
        records = wanted.train_size + wanted.test_size
        most_bytes = _BESIDE_BYTES + records * cifar.record_bytes(wanted.label_bytes)
        cifar.unpack(archive, folder, names=(*wanted.train, wanted.test[0]), most_bytes=most_bytes)
        found = _find_binary(wanted, data_dir)
        assert found is not None, "unpacked where it is looked for"
    train_files, test_file = found
    classes = wanted.spec.classes
    train = cifar.read_records(train_files, label_bytes=wanted.label_bytes, classes=classes)
    test = cifar.read_records([test_file], label_bytes=wanted.label_bytes, classes=classes)
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
