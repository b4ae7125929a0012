"""Cached folders: filled once, verified, and safe to request from several processes at a time."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from lib.atomic import naming
from lib.errors import os_error

_MANIFEST = "manifest.json"
_VERIFIED_BYTES = 2**30  # beyond it only sizes are checked: hashing would delay every start
_check: ContextVar[Callable[[], object]] = ContextVar("_check", default=lambda: None)


@contextmanager
def checked_before(check: Callable[[], object]) -> Iterator[None]:
    """Context that calls `check`, which may refuse, once before anything is downloaded, copied or made."""
    token = _check.set(functools.cache(check))
    try:
        yield
    finally:
        _check.reset(token)


def check_now() -> None:
    """Make the check of `checked_before`."""
    _check.get()()


def cached_folder(
    folder: Path, *, identity: str, fill: Callable[[Path], None], log: Callable[[str], None]
) -> Path:
    """Return `folder`, filled by `fill`, which gets the path of an empty folder.

    identity: everything that the content depends on. A folder of another identity, or with a changed file, is
    filled again, with the reason in `log`. It appears atomically; one process fills it while others wait.
    Raises ToolkitError if it cannot be written.
    """
    if _fault(folder, identity) is None:
        return folder
    check_now()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder):
            fault = _fault(folder, identity)  # another process may just have made it
            if fault is not None:
                if fault:
                    log(f"{folder}: {fault}; making it again")
                _make(folder, identity, fill)
    except BrokenPipeError:  # from `log`: standard output is closed
        raise
    except OSError as error:
        todo = "free space or give write permission there"
        raise os_error("write the data cache", error, todo=todo) from error
    return folder


def fingerprint(*parts: object) -> str:
    """Return the hexadecimal SHA-256 of the text of `parts`."""
    text = "\n".join(map(str, parts))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()  # a file's name may be no UTF-8


def content_of(folder: Path) -> str:
    """Return the SHA-256 of the contents and names of all files in a filled `folder`."""
    files: dict[str, tuple[int, str]] = json.loads((folder / _MANIFEST).read_text())["files"]
    return fingerprint(*(f"{name} {digest}" for name, (_, digest) in sorted(files.items())))


def _fault(folder: Path, identity: str) -> str | None:
    """Return None if the folder is valid, "" if there is none, else its fault."""
    if not folder.exists():
        return ""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if manifest["fingerprint"] != fingerprint(identity):
            return "made from something else"
        read_bytes = 0
        for name, (size_bytes, digest) in sorted(manifest["files"].items(), key=lambda file: file[1]):
            if (folder / name).stat().st_size != size_bytes:
                return f"{name} has another size than was written"
            read_bytes += size_bytes  # small files first, so that most files are read
            if read_bytes <= _VERIFIED_BYTES and _digest(folder / name) != digest:
                return f"{name} has another content than was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, AttributeError, TypeError, NotADirectoryError):
        return f"{_MANIFEST} is damaged"
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _make(folder: Path, identity: str, fill: Callable[[Path], None]) -> None:
    """Fill a folder beside `folder` and rename it. Under the lock, so leftovers can be removed."""
    new = folder.with_name(f".{folder.name}.new")
    for leftover in (new, folder):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink(missing_ok=True)
    new.mkdir()
    try:
        with naming(folder):
            fill(new)
        files = {
            str(path.relative_to(new)): (path.stat().st_size, _digest(path))
            for path in sorted(new.rglob("*"))
            if path.is_file()
        }
        manifest = {"fingerprint": fingerprint(identity), "files": files}
        with naming(folder):
            (new / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # exists only after a failure


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file of `path`, released at the latest when the process ends."""
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
