"""Atomic file writes: after a kill or power cut a reader finds the old or the new version, whole. Locks.

All functions but `save` and `try_lock` raise OSError, with the name of the file, which is then the old
version, or the new one if only making it durable failed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lib.errors import ConfigError, os_error, os_errors

_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}  # to open them anew would empty a file that they lead to
_PAUSE_SECONDS = 0.02  # between tries of a lock


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError that names no file, as errors of write() and of numpy's writers do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.strerror = error.strerror or str(error)
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace the contents of `path` by `text` in UTF-8, atomically and durably."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the contents of `path` by `data`, atomically and durably. A symbolic link is followed.

    Standard streams and what is no file are written to.
    """
    if is_stream(path):  # a rename would replace the device, or the file to which a stream is redirected
        sys.stdout.flush()
        number = _STREAMS.get(str(path))
        opened = path.open("wb") if number is None else os.fdopen(os.dup(number), "wb")
        with naming(path), opened as stream:
            stream.write(data)
        return
    path = path.resolve()
    if path.is_dir():  # the error of a rename would name the temporary file
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        write_new(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def is_stream(path: Path) -> bool:
    """Return True for standard output and errors, devices and pipes."""
    found = os.path.exists(path)  # False, too, in a folder that cannot be read  # noqa: PTH110
    return str(path) in _STREAMS or (found and not path.is_file() and not path.is_dir())


def save(path: Path, data: str | bytes, *, action: str = "write", todo: str = "") -> None:
    """Write a file, and the folder that it is in. Raises ToolkitError that says what `action` failed."""
    with os_errors(action, todo=todo):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, data.encode() if isinstance(data, str) else data)


def check_writable(
    path: Path, variable: str, *, log: Callable[[str], object], suffixes: Sequence[str] = ()
) -> None:
    """Raise ConfigError if the file `path`, which ends in one of `suffixes`, or the folder cannot be made.

    Without suffixes it is a folder. Folders above it that are not there will be, which is logged: a name may
    be misspelt. Devices and pipes need no suffix.
    """
    file, is_written_to = (path if suffixes else path / "-").absolute(), bool(suffixes) and is_stream(path)
    above = next(each for each in file.parents if os.path.lexists(each))
    if not is_written_to and (not above.is_dir() or not os.access(above, os.W_OK | os.X_OK)):
        why = "it is no folder that you can write to"
        raise ConfigError(f"{variable}={path} cannot be written in {above}", why=why)
    if suffixes and path.is_dir():
        raise ConfigError(f"{variable}={path} is a folder", todo="name a file in it")
    if suffixes and path.suffix.lower() not in suffixes and not is_written_to:
        what = f"{variable}={path} does not end in {' or '.join(suffixes)}"
        raise ConfigError(what, why="another file may be meant", todo=f"write {variable}=NAME{suffixes[0]}")
    if above not in (path.absolute(), path.absolute().parent):
        log(f"{variable}={path}: there is no folder {path.parent}; it will be made")


def write_new(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet, durably but not atomically.

    For files of a directory that nobody looks into before it is renamed as a whole.
    """
    with naming(path), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, path: Path) -> None:
    """Rename a file that was written incrementally to its final name, durably, replacing any file there."""
    sync_file(temporary)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Make the contents of an incrementally written file durable."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the renames in directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support fsync of directories; there is no alternative on them.
        if error.errno != errno.EINVAL:
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


class HashingFile:
    """File object for torch.save that counts and hashes while writing, so that nothing is read again.

    An exception that crosses torch's C++ writer comes out as a different one, so the first
    error is kept and later writes are dropped.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write `data` and return its size in bytes."""
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self._digest.update(data)
            self.size_bytes += size
        return size

    def flush(self) -> None:
        """Do nothing: torch.save calls it, and the owner flushes the file once."""

    def sha256(self) -> str:
        """Return the SHA-256 of what was written."""
        return self._digest.hexdigest()


def try_lock(file: Path, *, tries: int) -> int | None:
    """Return a descriptor that holds the lock `file`; None where another one does. Raises ToolkitError."""
    descriptor: int | None = None
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            error.filename = str(file)
            raise os_error("lock", error) from error
        if tries <= 1:
            return None
        time.sleep(_PAUSE_SECONDS)
        return try_lock(file, tries=tries - 1)
    return descriptor
