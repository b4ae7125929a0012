"""Lock of a configuration: one command at a time changes it, from reading to writing.

The lock is a file beside the configuration, removed when the command ends. The kernel releases that of a
killed command, and the next one removes it.
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
from lib.kconf.project import refusals, report_notices
from lib.kconf.tree import display

_PAUSE_SECONDS = 0.05
_ATTEMPTS = 20  # while other commands remove the directory that they had created
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Where no lock file can be created, the command itself cannot write either, and reports that.
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


@contextlib.contextmanager
def locked(path: Path, command: str, *, interactive: bool = False) -> Iterator[None]:
    """Hold the lock of `path` for the block; wait for a command that holds it now.

    interactive: this command lasts until the user ends it, so that others are refused instead of waiting.

    Raises ConfigError where an interactive command holds the lock.
    """
    created = [one for one in (path.parent, *path.parent.parents) if not one.exists()]
    real = Path(os.path.realpath(path))
    lock = real.parent / f".{real.name.removeprefix('.')}.lock"
    try:
        with refusals(path):
            holder = f"{int(interactive)} {command} {os.getpid()} {os.uname().nodename}"
            descriptor = _acquire(lock, path, holder)
        try:
            yield
        finally:
            if descriptor is not None:
                lock.unlink(missing_ok=True)
                os.close(descriptor)
    finally:
        for directory in created:
            with contextlib.suppress(OSError):  # unless something was written there
                directory.rmdir()


def _acquire(lock: Path, path: Path, words: str) -> int | None:
    """Open and acquire the lock, with `words` in it; None where nothing can be written."""
    reported = False
    while (descriptor := _open(lock, path)) is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
            os.close(descriptor)
            reported = _report_holder(holder, path, reported=reported)
            time.sleep(_PAUSE_SECONDS)
            continue
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            risk = f"two commands that change {display(path)} at one moment can lose a change"
            report_notices([f"{display(lock.parent)} is on a file system without locks: {risk}"])
            return descriptor
        if _is_at(descriptor, lock):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, words.encode(), 0)
            return descriptor
        os.close(descriptor)
    return None


def _open(lock: Path, path: Path) -> int | None:
    for _ in range(_ATTEMPTS):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            if path.is_symlink() and not lock.parent.is_dir():
                return None
            time.sleep(_PAUSE_SECONDS)
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
    return None  # the file system has such places: /proc, or an automounter's directory


def _is_at(descriptor: int, lock: Path) -> bool:
    """True if the open file is still at `lock`: its previous holder may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False


def _report_holder(words: str, path: Path, *, reported: bool) -> bool:
    """Print once which command this waits for. Raises ConfigError if that one is interactive."""
    if not words:
        return reported
    interactive, command, process, machine = (*words.split(), "", "", "", "")[:4]
    holder = f"{command} (process {process} on {machine})" if machine else "another program"
    if interactive == "1":
        raise ConfigError(f"{holder} has {display(path)} open", todo="end that first")
    if not reported:
        report_notices([f"waiting for {holder}, which changes {display(path)}"])
    return True
