"""Files at a URL, through fsspec, which is imported only when a URL is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import ConfigError, ToolkitError

_OURS = ("anneal", "lib", "train", "models", "scripts")


class StorageError(ToolkitError):
    """The storage cannot be reached, or an operation on it failed."""


class MissingError(StorageError):
    """The file or folder does not exist."""


def is_url(text: str) -> bool:
    """Return True if `text` has a protocol, such as s3://."""
    return "://" in text


@dataclass(frozen=True, slots=True)
class Storage:
    """Files below one URL, named relative to it. All methods raise StorageError, or MissingError."""

    url: str  # without a slash at its end
    _files: Any  # an fsspec.AbstractFileSystem
    _root: str  # of the URL, as that file system names it
    _on_disk: bool  # a half-written file can be seen on a disk, but not on object storage

    def below(self, name: str) -> Storage:
        """Return the part of the storage below `name`."""
        return Storage(f"{self.url}/{name}", self._files, self._path(name), self._on_disk)

    def entries(self, folder: str = "") -> list[str]:
        """Return the names of files and folders directly in a folder, sorted; empty if it does not exist."""
        path = self._path(folder)
        with _errors(f"list {self.url}/{folder}"):
            self._files.invalidate_cache()  # other processes may have written
            try:
                found = self._files.ls(path, detail=False)
            except FileNotFoundError:
                return []
        inside = (str(entry).strip("/") for entry in found)
        names = {entry.rpartition("/")[2] for entry in inside if entry != path.strip("/")}
        return sorted(names - {""})

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file, at any depth; a URL of one file has the name ""."""
        with _errors(f"list {self.url}"):
            self._files.invalidate_cache()
            found = self._files.find(self._root, detail=True)
        root = self._root.strip("/")
        return {
            str(path).strip("/").removeprefix(root).lstrip("/"): int(facts["size"])
            for path, facts in found.items()
            if not str(path).endswith("/")  # empty objects by which consoles of buckets show folders
        }

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with _errors(f"read {self.url}/{name}"):
            return bytes(self._files.cat_file(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a small file in one operation."""
        path = self._path(name)
        with _errors(f"write {self.url}/{name}"):
            if self._on_disk:
                folder, _, file = path.rpartition("/")
                self._files.pipe_file(f"{folder}/.{file}.new", data)
                self._files.mv(f"{folder}/.{file}.new", path)
            else:
                self._files.pipe_file(path, data)

    def upload(self, path: Path, name: str) -> None:
        """Copy the local file `path` to `name`."""
        with _errors(f"write {self.url}/{name}"):
            self._files.put_file(str(path), self._path(name))

    def download(self, name: str, path: Path) -> None:
        """Copy the file `name` to the local `path`."""
        with _errors(f"read {self.url}/{name} into {path}"):
            self._files.get_file(self._path(name), str(path))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content; succeeds if it does not exist."""
        with _errors(f"remove {self.url}/{name}"), suppress(FileNotFoundError):
            self._files.rm(self._path(name), recursive=True)

    def check(self) -> None:
        """Check access: write a small file, read it, and remove it."""
        name, data = f".check-{os.urandom(4).hex()}", b"anneal\n"
        self.write(name, data)
        try:
            if self.read(name) != data:
                why = "the content differs from what was written"
                raise StorageError(f"cannot read {self.url}/{name}", why=why)
        finally:
            self.remove(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def open_storage(url: str, *, requested: str) -> Storage:
    """Open `url`, from the option `requested`. Raises ConfigError if it is none or lacks its package."""
    if not is_url(url):
        raise ConfigError(f'{requested}="{url}" is not a URL', todo=f"a path is written file://{url}")
    from fsspec.core import url_to_fs

    if not url.partition("://")[2].strip("/"):
        # Without its slashes it would be a path relative to the working directory.
        raise ConfigError(f'{requested}="{url}" names no bucket or folder', todo="give one after ://")
    url = url.rstrip("/")
    protocol = url.partition(":")[0]
    on_disk = protocol in ("file", "local")
    # Disks need their folders created; on object storage this might create a bucket.
    options = {"auto_mkdir": True} if on_disk else {}
    try:
        with _errors(f"open {url}"):
            files, root = url_to_fs(url, **options)
    except ImportError as error:
        package = _package_of(protocol, error)
        raise ConfigError(
            f'{requested}="{url}": the package {package} is not installed',
            todo=f"install it, for example with .venv/bin/pip install {package}",
        ) from error
    except StorageError as error:
        raise ConfigError(f'{requested}="{url}" cannot be opened', why=error.why) from error
    return Storage(url, files, str(root).rstrip("/"), on_disk)


def _package_of(protocol: str, error: ImportError) -> str:
    """The package that opens URLs of this protocol."""
    from fsspec.registry import known_implementations

    package = str(known_implementations[protocol]["class"]).partition(".")[0]
    if package != "fsspec":
        return package
    cause = error.__cause__  # the cause names one package, fsspec's own message several
    return (isinstance(cause, ImportError) and cause.name) or error.name or f"for {protocol}://"


@contextmanager
def _errors(action: str) -> Iterator[None]:
    """Convert errors of the storage to StorageError; programming errors pass through."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingError(f"cannot {action}", why="it does not exist") from error
    except Exception as error:
        if _is_storage_error(error):
            message = (isinstance(error, OSError) and error.strerror) or error
            why = " ".join(str(message).split()) or type(error).__name__
            raise StorageError(f"cannot {action}", why=why) from error
        raise


def _is_storage_error(error: Exception) -> bool:
    """True for errors of packages below fsspec (botocore, aiohttp), which have no common base class."""
    if isinstance(error, ImportError):
        return False
    if isinstance(error, OSError | RuntimeError | ValueError):
        return True
    return type(error).__module__.partition(".")[0] not in ("builtins", *_OURS)
