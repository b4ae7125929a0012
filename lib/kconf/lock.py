"""One command at a time changes a configuration: from before it is read until after it is written.

The lock is a file beside the configuration, gone when the command has ended. The kernel releases that of a
command that was killed, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from lib.errors import ConfigError
from lib.kconf.project import refusals, tell
from lib.kconf.tree import display

_PAUSE_SECONDS = 0.05
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Where no file can be made, none can be changed either: the command itself says so, if it comes to that.
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def locked(path: Path, command: str, *, interactive: bool = False) -> Iterator[None]:
    """Let no other command change `path` for the block; wait for one that does so now.

    interactive: this one lasts until a person ends it, so that others are refused and do not wait.

    Raises ConfigError where such a one has it.
    """
    made = [one for one in (path.parent, *path.parent.parents) if not one.exists()]
    real = Path(os.path.realpath(path))
    lock = real.parent / f".{real.name.removeprefix('.')}.lock"
    try:
        with refusals(path):
            descriptor = _acquire(
                lock, path, f"{int(interactive)} {command} {os.getpid()} {os.uname().nodename}"
            )
        try:
            yield
        finally:
            if descriptor is not None:
                lock.unlink(missing_ok=True)
                os.close(descriptor)
    finally:
        for directory in made:
            with contextlib.suppress(
                OSError
            ):  # it has what was written, or what another command has put there
                directory.rmdir()


def _acquire(lock: Path, path: Path, words: str) -> int | None:
    """Open the lock, with `words` in it, as soon as nobody else has it; None where nothing can be written."""
    told = False
    while (descriptor := _open(lock, path)) is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
            os.close(descriptor)
            told = _tell_holder(holder, path, told=told)
            time.sleep(_PAUSE_SECONDS)
            continue
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            tell(
                [
                    f"{display(lock.parent)} is on a file system without locks: two commands that change"
                    f" {display(path)} at one moment can lose a change"
                ]
            )
            return descriptor
        if _is_at(descriptor, lock):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, words.encode(), 0)
            return descriptor
        os.close(descriptor)
    return None


def _open(lock: Path, path: Path) -> int | None:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if path.is_symlink() and not lock.parent.is_dir():
                return None
            # Else a command that failed has removed the directory that it had made.
        except IsADirectoryError as error:
            raise ConfigError(
                f"{display(lock)} is a directory",
                why=f"it must be free for the lock of {display(path)}",
                todo="move it elsewhere",
            ) from error
        except OSError as error:
            if error.errno not in _NOT_WRITABLE or os.path.lexists(lock):
                raise
            return None


def _is_at(descriptor: int, lock: Path) -> bool:
    """Whether the file is still there: whoever had it may have removed it since it was opened here."""
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False


def _tell_holder(words: str, path: Path, *, told: bool) -> bool:
    """Say once for whom this waits, as soon as that is written. Raises ConfigError for whom it does not."""
    if not words:
        return told
    interactive, command, process, machine = (*words.split(), "", "", "", "")[:4]
    holder = f"{command} (process {process} on {machine})" if machine else "another program"
    if interactive == "1":
        raise ConfigError(f"{holder} has {display(path)} open", todo="end that first")
    if not told:
        tell([f"waiting for {holder}, which changes {display(path)}"])
    return True
