"""A data directory at a URL: copied to the disk once, and used from there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from lib.data.cache import cached_folder, fingerprint
from lib.errors import DataError
from lib.runs.storage import MissingError, Storage, open_storage

_TOLD_BYTES = 10**9  # between two lines about a long copy
_FOLDER, _FILE = "folder", "file"  # what is at the URL, and where the copy of it lies


def local_copy(url: str, *, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder, or the file, at `url` on this disk, below `cache_dir`; copied there if it is not.

    Storage is asked only then. A copy that is no longer as it was is made again (`cached_folder`). Raises
    ConfigError where the URL cannot be opened, DataError where there is nothing at it or what came is not
    complete, ToolkitError where the storage or the disk fails.
    """
    url = url.rstrip("/")
    folder = cached_folder(
        _place(url, cache_dir),
        identity=url,
        fill=partial(_copy, url, say=say),
        say=say,
    )
    say(f"Data: {url}, as it was copied to {folder}")
    file = folder / _FILE / url.rpartition("/")[2]
    return file if file.exists() else folder / _FOLDER


def copied(url: str, *, cache_dir: Path) -> Path | None:
    """What `local_copy` would give without asking storage; None where nothing was copied yet."""
    url = url.rstrip("/")
    folder = _place(url, cache_dir)
    file = folder / _FILE / url.rpartition("/")[2]
    return file if file.exists() else folder / _FOLDER if folder.exists() else None


def _place(url: str, cache_dir: Path) -> Path:
    return cache_dir / f"copy-{fingerprint(url)[:12]}"


def _copy(url: str, folder: Path, *, say: Callable[[str], None]) -> None:
    storage = open_storage(url, asked="CONFIG_DATA_DIR")
    sizes = _sizes(storage)
    free_bytes, all_bytes = shutil.disk_usage(folder).free, sum(sizes.values())
    if all_bytes > free_bytes:
        raise DataError(
            f"{url} does not fit on the disk of {folder.parent}",
            why=f"it has {all_bytes / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free",
        )
    say(f"Data: copying {len(sizes)} files, {all_bytes / 1e6:.1f} MB, from {url} to {folder.parent}")
    done_bytes = told_bytes = 0
    for name, size_bytes in sizes.items():
        path = folder / _FOLDER / name if name else folder / _FILE / url.rpartition("/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.download(name, path)
        found_bytes = path.stat().st_size
        if found_bytes != size_bytes:
            raise DataError(
                f"{url}/{name} came with {found_bytes} bytes, not {size_bytes}",
                todo="start again; somebody may be writing there",
            )
        done_bytes += size_bytes
        if done_bytes - told_bytes >= _TOLD_BYTES:
            say(f"Data: copied {done_bytes / 1e9:.1f} of {all_bytes / 1e9:.1f} GB")
            told_bytes = done_bytes


def _sizes(storage: Storage) -> Mapping[str, int]:
    try:
        sizes = storage.sizes()
    except MissingError:
        sizes = {}
    if not sizes:
        raise DataError(f"there are no files at {storage.url}", todo="look at CONFIG_DATA_DIR")
    for name in sizes:
        if ".." in PurePosixPath(name).parts:
            raise DataError(f"{storage.url}/{name} is no name that a disk could have")
    return sizes
