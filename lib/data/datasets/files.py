"""Data sets by name: opening them as plug-ins, their location, and how missing files are downloaded."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from lib.data.cache import check_now
from lib.data.datasets.own_code import DataCode, check_dataset
from lib.data.types import ArrayPart, Dataset, Images, ImageSpec
from lib.errors import DataError, os_errors
from lib.plugins import DATASETS
from lib.runs.console import download_progress
from lib.units import some_of

TokenizerName: TypeAlias = Literal["byte", "char", "gpt2", "huggingface"]


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to download: its name, its SHA-256, and the URLs of the folders that have it."""

    file: str
    sha256: str
    folders: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the file, in the order they are tried."""
        return tuple(f"{folder}/{self.file}" for folder in self.folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLocation:
    """Location of a data set, and settings that all data sets share (None: not applicable).

    name:       in CONFIG_DATASET.
    root:       of the source tree, to which relative paths refer.
    data_dir:   CONFIG_DATA_DIR. cache_dir: for generated and packed data.
    download:   whether missing files may be downloaded into `data_dir`.
    image_size: height and width of packed images.
    block_size: context length in tokens. tokenizer: None for data that are tokens already. tokenizer_dir: of
                a tokenizer of Hugging Face.
    """

    name: str
    root: Path
    data_dir: Path | None
    cache_dir: Path
    download: bool
    log: Callable[[str], None]
    image_size: int | None = None
    block_size: int | None = None
    tokenizer: TokenizerName | None = None
    tokenizer_dir: str | None = None

    @property
    def files(self) -> Path:
        """`data_dir` of a data set that needs one."""
        assert self.data_dir is not None, f"{self.name} is made of files"
        return self.data_dir

    def find_all(
        self, remotes: tuple[Remote, ...], folders: tuple[str, ...], *, name: str, instead: str
    ) -> list[Path]:
        """Return all `remotes` from the first of `folders` that has them, or download them into the first."""
        for folder in folders:
            found = [self.files / folder / remote.file for remote in remotes]
            if all(file.is_file() for file in found):
                return found
        return [self._find(remote, self.files / folders[0], name=name, instead=instead) for remote in remotes]

    def find_image_file(self, remote: Remote, content: str = "") -> Path:
        """Return a file of an image set, downloaded if missing. content: of an archive, for messages."""
        instead = "an embedded set (CONFIG_DATASET_DIGITS=y or CONFIG_DATASET_SCENES=y)"
        folder = self.files / self.name
        return self._find(remote, folder, name=f"data set {self.name}", instead=instead, content=content)

    def _find(self, remote: Remote, folder: Path, *, name: str, instead: str, content: str = "") -> Path:
        """Return `folder`/FILE, downloaded if allowed. Raises DataError with the alternatives."""
        target = folder / remote.file
        if target.is_file():
            return target
        is_file = file_in_place_of(self.files)
        reason = is_file or "CONFIG_DATA_DOWNLOAD is off"
        if self.download and not is_file:
            from lib.data.datasets.download import fetch

            check_now()
            try:
                with download_progress() as progress:
                    fetch(target, urls=remote.urls, sha256=remote.sha256, log=self.log, progress=progress)
                return target
            except DataError as error:
                reason = str(error)
        file = content or remote.file.removesuffix(".gz")
        allow = "" if self.download else ", or set CONFIG_DATA_DOWNLOAD=y"
        raise DataError(
            f"{name} is not there: no {file} in {folder} or {folder.parent}",
            why=reason,
            todo=f"put its files into {folder}{allow}, or use {instead}",
        )


def open_dataset(location: DataLocation, options: Mapping[str, Any]) -> Dataset:
    """Open the data set `location.name`; `options` are the values of its own symbols.

    Files are looked for in `location.data_dir` and in a folder of the set's name in it, and downloaded to the
    latter if that is allowed. Generated or packed data are kept in `location.cache_dir`. Raises DataError if
    the set is missing or damaged, ConfigError if it cannot meet the request, ToolkitError if the disk fails.
    """
    with DataCode(location.name):
        chosen = DATASETS.options(location.name, options)
        dataset: Dataset = DATASETS.load(location.name).open_set(chosen, location)
        check_dataset(dataset, location.name, "open_set")
    return dataset


def describe_dataset(location: DataLocation, options: Mapping[str, Any]) -> Dataset | None:
    """Return the metadata of a data set, with zeros for samples; None if only the contents tell them.

    Raises what `open_dataset` does, as far as file names and headers tell.
    """
    with DataCode(location.name):
        chosen = DATASETS.options(location.name, options)
        describe = getattr(DATASETS.load(location.name), "describe", None)
        metadata: Dataset | None = describe and describe(chosen, location)
        if metadata is not None:
            check_dataset(metadata, location.name, "describe")
    return metadata


def read_published(folder: Path) -> dict[str, Any]:
    """Read published.toml in the folder of a data-set plug-in: facts about its published sets."""
    return tomllib.loads((folder / "published.toml").read_text(encoding="utf-8"))


def remotes_of(known: Mapping[str, Any]) -> tuple[Remote, ...]:
    """Return the files of a published set by their names and SHA-256; each of its URLs has all."""
    return tuple(Remote(file, sha256, tuple(known["urls"])) for file, sha256 in known["files"].items())


def first_file(files: Iterable[Path]) -> Path | None:
    """Return the first of `files` that exists."""
    return next((file for file in files if file.is_file()), None)


def find_file(data_dir: Path, name: str, spellings: Sequence[str], *, why: str = "", instead: str) -> Path:
    """Return the first of `spellings` in DATA_DIR/`name` or DATA_DIR. Raises DataError, with `instead`."""
    folders = data_dir / name, data_dir
    file = first_file(folder / spelling for folder in folders for spelling in spellings)
    if file is None:
        what = f"there is no {' or '.join(spellings)} in {folders[0]} or {folders[1]}"
        raise DataError(what, why=file_in_place_of(data_dir) or why, todo=f"put it there, or {instead}")
    return file


def check_there(file: Path, symbol: str, *suffixes: str) -> None:
    """Raise DataError if the file of CONFIG_`symbol` is not there, with others that end in `suffixes`."""
    if file.is_file():
        return
    folder, kinds = file.parent, ", ".join(f"*{suffix}" for suffix in suffixes)
    is_file = file_in_place_of(folder)
    why = is_file or f"there is no folder {folder}"
    if folder.is_dir():
        found = sorted(each.name for each in folder.iterdir() if each.suffix in suffixes and each.is_file())
        why = f"{folder} has {some_of(found) if found else f'no {kinds}'}"
    todo = f"put it there, or name another by CONFIG_DATA_DIR and CONFIG_{symbol}"
    if is_file:
        todo = "point CONFIG_DATA_DIR to the folder of the file"
    raise DataError(f"{file} {'is a folder' if file.is_dir() else 'is not there'}", why=why, todo=todo)


def file_in_place_of(folder: Path) -> str:
    """Return that a file is in the place of `folder`, or of one above it; "" where none is."""
    file = first_file((folder, *folder.parents))
    return f"{file} is a file, not a folder" if file else ""


def marks(files: Iterable[Path]) -> Iterator[str]:
    """Yield name, size and modification time of each file. Raises ToolkitError if one is missing."""
    for file in files:
        with os_errors("read"):
            status = file.stat()
        yield f"{file} {status.st_size} {status.st_mtime_ns}"


def damaged(file: Path, why: str) -> DataError:
    """Return the error for a damaged file."""
    return DataError(f"{file} is damaged", why=why, todo="delete it and fetch it again")


def check_labels(labels: Images, file: Path, *, classes: int) -> None:
    """Raise DataError if a label is out of range."""
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        raise damaged(file, f"label {labels[wrong[0]]} of sample {wrong[0]} is not below {classes}")


def naming_note(names: Iterable[str]) -> str:
    """Return what is odd about names of classes that were read as they stand; "" for nothing.

    Some are numbers and others are not, or two differ in case or in how a number is written alone: often they
    are two spellings of one class.
    """
    same, numbers, words, notes = dict[str | float, list[str]](), list[str](), list[str](), list[str]()
    for name in names:
        number = _finite(name)
        (words if number is None else numbers).append(name)
        same.setdefault(name.casefold() if number is None else number, []).append(name)
    if numbers and words:
        notes.append(f"numbers ({some_of(numbers)}) and texts ({some_of(words)}) are classes side by side")
    if alike := [" and ".join(each) for each in same.values() if len(each) > 1]:
        notes.append(f"classes that differ in spelling alone: {some_of(alike)}")
    return f"; NOTE: {'; '.join(notes)}" if notes else ""


def _finite(text: str) -> float | None:
    """Return the finite number that `text` is; None for other texts."""
    try:
        return found if math.isfinite(found := float(text)) else None
    except ValueError:
        return None


def describe_images(spec: ImageSpec, sizes: tuple[int, int], where: str) -> Dataset:
    """Return the metadata of images (training, test) whose sizes come from `where`: zeros in one byte."""
    train, test = (
        ArrayPart(np.broadcast_to(np.uint8(0), (n, *spec.input_shape)), np.broadcast_to(np.int64(0), (n,)))
        for n in sizes
    )
    return Dataset(spec, train, test, f"{spec.name}: {where}, {sizes[0]} + {sizes[1]} images, not opened")
