"""A data directory at a URL: copied to the disk once, and used from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lib.data.cache import exclusive, fingerprint
from lib.errors import DataError, os_error
from lib.storage import MissingError, Storage, open_storage

_LISTING = ".copied.json"
_TOLD_BYTES = 10**9  # between two lines about a long copy


def local_copy(url: str, *, cache_dir: Path, say: Callable[[str], None]) -> Path:
    """The folder, or the file, at `url` on this disk, below `cache_dir`; copied there if it is not.

    Storage is asked only then. Until a copy is complete nobody sees it; one process makes it, others wait.
    One that lacks a file, or in which a size is not as it was, is made again, and `say` is told why. Raises
    ConfigError where the URL cannot be opened, DataError where there is nothing at it or what came is not
    complete, ToolkitError where the storage or the disk fails.
    """
    url = url.rstrip("/")
    folder = cache_dir / f"copy-{fingerprint(url)[:12]}"
    if _fault(folder) is not None:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with exclusive(folder):
                fault = _fault(folder)  # another process may just have made it
                if fault:
                    say(f"{folder}: {fault}; copying it again")
                if fault is not None:
                    _copy(open_storage(url, asked="CONFIG_DATA_DIR"), folder, say)
        except OSError as error:
            raise os_error(f"copy {url} to", error, todo="free space or give write permission") from error
    say(f"Data: {url}, as it was copied to {folder}")
    return folder / str(_listing(folder)["file"])


def _listing(folder: Path) -> dict[str, Any]:
    """sizes: of every file, in bytes. file: the name of the only one, where the URL is of one, or empty."""
    listing: dict[str, Any] = json.loads((folder / _LISTING).read_text())
    return listing


def _fault(folder: Path) -> str | None:
    """None if the copy is whole, "" if there is none, else what is wrong with it."""
    if not folder.exists():
        return ""
    try:
        for name, size_bytes in _listing(folder)["sizes"].items():
            if (folder / name).stat().st_size != size_bytes:
                return f"{name} has another size than was copied"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, AttributeError, TypeError, NotADirectoryError):
        return f"{_LISTING} is damaged"
    return None


def _copy(storage: Storage, folder: Path, say: Callable[[str], None]) -> None:
    """Copy beside `folder` and rename. Holding the lock, so leftovers of killed processes go."""
    sizes = _sizes(storage)
    file = storage.url.rpartition("/")[2] if set(sizes) == {""} else ""
    new = folder.with_name(f".{folder.name}.new")
    for leftover in (new, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    free_bytes, all_bytes = shutil.disk_usage(folder.parent).free, sum(sizes.values())
    if all_bytes > free_bytes:
        raise DataError(
            f"{storage.url} does not fit on the disk of {folder.parent}",
            why=f"it has {all_bytes / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB are free",
        )
    say(f"Data: copying {len(sizes)} files, {all_bytes / 1e6:.1f} MB, from {storage.url} to {folder}")
    new.mkdir()
    try:
        done_bytes = told_bytes = 0
        for name, size_bytes in sizes.items():
            path = new / (name or file)
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.download(name, path)
            found_bytes = path.stat().st_size
            if found_bytes != size_bytes:
                raise DataError(
                    f"{storage.url}/{name} came with {found_bytes} bytes, not {size_bytes}",
                    todo="start again; somebody may be writing there",
                )
            done_bytes += size_bytes
            if done_bytes - told_bytes >= _TOLD_BYTES:
                say(f"Data: copied {done_bytes / 1e9:.1f} of {all_bytes / 1e9:.1f} GB")
                told_bytes = done_bytes
        listing = {"file": file, "sizes": {name or file: size for name, size in sizes.items()}}
        (new / _LISTING).write_text(json.dumps(listing) + "\n")
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # there only if something failed


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
