"""Data directory at a URL, copied to the local disk once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from lib.data.cache import cached_folder, fingerprint
from lib.errors import DataError
from lib.runs.storage import MissingError, Storage, open_storage

_LOG_BYTES = 10**9  # between two progress lines
_FOLDER, _FILE = "folder", "file"  # subfolder of the copy, by what is at the URL


def local_copy(url: str, *, cache_dir: Path, log: Callable[[str], None]) -> Path:
    """Return the local copy of the folder or file at `url` in `cache_dir`, made if missing or damaged.

    Raises ConfigError if the URL cannot be opened, DataError if there is nothing at it or the copy is
    incomplete, ToolkitError if the storage or the disk fails.
    """
    url = url.rstrip("/")
    fill = partial(_copy, url, log=log)
    folder = cached_folder(_folder_of(url, cache_dir), identity=url, fill=fill, log=log)
    log(f"Data: {url}, as it was copied to {folder}")
    return _content(url, folder)


def copied(url: str, *, cache_dir: Path) -> Path | None:
    """Return the local copy without access to the storage; None if there is none."""
    url = url.rstrip("/")
    folder = _folder_of(url, cache_dir)
    return _content(url, folder) if folder.exists() else None


def _content(url: str, folder: Path) -> Path:
    file = folder / _FILE / url.rpartition("/")[2]
    return file if file.exists() else folder / _FOLDER


def _folder_of(url: str, cache_dir: Path) -> Path:
    return cache_dir / f"copy-{fingerprint(url)[:12]}"


def _copy(url: str, folder: Path, *, log: Callable[[str], None]) -> None:
    storage = open_storage(url, requested="CONFIG_DATA_DIR")
    sizes = _sizes(storage)
    free_bytes, all_bytes = shutil.disk_usage(folder).free, sum(sizes.values())
    if all_bytes > free_bytes:
        raise DataError(
            f"{url} does not fit on the disk of {folder.parent}",
            why=f"it has {all_bytes / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free",
            todo="free space there",
        )
    log(f"Data: copying {len(sizes)} files, {all_bytes / 1e6:.1f} MB, from {url} to {folder.parent}")
    done_bytes = logged_bytes = 0
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
        if done_bytes - logged_bytes >= _LOG_BYTES:
            log(f"Data: copied {done_bytes / 1e9:.1f} of {all_bytes / 1e9:.1f} GB")
            logged_bytes = done_bytes


def _sizes(storage: Storage) -> Mapping[str, int]:
    try:
        sizes = storage.sizes()
    except MissingError:
        sizes = {}
    if not sizes:
        raise DataError(f"there are no files at {storage.url}", todo="look at CONFIG_DATA_DIR")
    for name in sizes:
        if ".." in PurePosixPath(name).parts:
            raise DataError(f"{storage.url}/{name} is not a name that a disk could have", todo="rename it")
    return sizes
