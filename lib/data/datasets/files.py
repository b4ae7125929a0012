"""Where a data set is: its files, or how they come there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from lib.data.datasets.catalogue import Remote
from lib.data.types import Images
from lib.errors import DataError, os_error
from lib.runs.console import download_progress

TokenizerName: TypeAlias = Literal["byte", "char", "gpt2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a data set is looked for, and what is asked of it whichever it is. None: it is asked nothing.

    name:       of the data set, as CONFIG_DATASET has it.
    root:       of the source tree, where a relative path starts.
    data_dir:   where its files are looked for, if anywhere. cache_dir: where what is made is kept.
    download:   whether what is missing may be fetched into `data_dir`.
    image_size: height and width of images that are packed.
    block_size: tokens that a model sees at once. tokenizer: None where there are tokens already.
    """

    name: str
    root: Path
    data_dir: Path | None
    cache_dir: Path
    download: bool
    say: Callable[[str], None]
    image_size: int | None = None
    block_size: int | None = None
    tokenizer: TokenizerName | None = None

    @property
    def files(self) -> Path:
        """DATA_DIR, for what is made of files."""
        assert self.data_dir is not None, f"{self.name} is made of files"
        return self.data_dir

    def have(
        self, remotes: tuple[Remote, ...], folders: tuple[str, ...], *, name: str, instead: str
    ) -> list[Path]:
        """The files of `remotes`, all from one of `folders` below DATA_DIR, or fetched into the first."""
        for folder in folders:
            found = [self.files / folder / remote.file for remote in remotes]
            if all(file.is_file() for file in found):
                return found
        get = partial(find_or_fetch, name=name, download=self.download, instead=instead, say=self.say)
        return [get(remote, self.files / folders[0]) for remote in remotes]

    def image_file(self, remote: Remote, looked_for: str = "") -> Path:
        """A file of a published set of images, fetched if it is not in DATA_DIR/NAME."""
        return find_or_fetch(
            remote,
            self.files / self.name,
            name=f"data set {self.name}",
            download=self.download,
            instead="an embedded set (CONFIG_DATASET_DIGITS=y or CONFIG_DATASET_SCENES=y)",
            say=self.say,
            looked_for=looked_for,
        )


def first_file(files: Iterable[Path]) -> Path | None:
    """The first of `files` that is there."""
    return next((file for file in files if file.is_file()), None)


def find_or_fetch(
    remote: Remote,
    folder: Path,
    *,
    name: str,
    download: bool,
    instead: str,
    say: Callable[[str], None],
    looked_for: str = "",
) -> Path:
    """`folder`/FILE, downloaded if it is not there and may be.

    name, instead: what the file is of, and what needs no file. looked_for: what is to be there instead of an
    archive. Raises DataError that names the ways out.
    """
    target = folder / remote.file
    if target.is_file():
        return target
    reason = "CONFIG_DATA_DOWNLOAD is off"
    if download:
        from lib.data.datasets.download import fetch

        try:
            with download_progress() as progress:
                fetch(target, urls=remote.urls, sha256=remote.sha256, say=say, progress=progress)
            return target
        except DataError as error:
            reason = str(error)
    file = looked_for or remote.file.removesuffix(".gz")
    allow = "" if download else ", or set CONFIG_DATA_DOWNLOAD=y"
    raise DataError(
        f"{name} is not there: no {file} in {folder} or {folder.parent}",
        why=reason,
        todo=f"put its files into {folder}{allow}, or use {instead}",
    )


def marks(files: Iterable[Path]) -> Iterator[str]:
    """What tells that files are as they were, without reading them. Raises ToolkitError where one is gone."""
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise os_error("read", error) from error
        yield f"{file} {status.st_size} {status.st_mtime_ns}"


def damaged(file: Path, why: str) -> DataError:
    return DataError(f"{file} is damaged", why=why, todo="delete it and fetch it again")


def check_labels(labels: Images, file: Path, *, classes: int) -> None:
    """Raise DataError where a label is out of range."""
    wrong = np.flatnonzero(labels >= classes)
    if len(wrong):
        raise damaged(file, f"label {labels[wrong[0]]} of sample {wrong[0]} is not below {classes}")
