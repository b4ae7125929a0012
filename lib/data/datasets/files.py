"""Files of a published data set: where they are, or how they come there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lib.data.datasets.catalogue import Remote
from lib.errors import DataError, os_error
from lib.runs.console import download_progress


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
