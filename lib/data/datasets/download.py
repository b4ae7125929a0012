"""Resumable, verified download of a file from the first mirror that serves it completely."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from lib import atomic
from lib.data.cache import exclusive
from lib.errors import DataError, os_error

# Called with the name of the file, the bytes so far, and the total (0 if the server does not tell).
Progress: TypeAlias = Callable[[str, int, int], None]

_BLOCK_BYTES = 1 << 18
LARGEST_BYTES = 2**30  # upper bound of what a server may send; no published file is larger
_TRIES = 3  # per mirror without any progress


class _MirrorError(Exception):
    """This mirror failed; the text says why."""


class _TooLargeError(_MirrorError):
    """The mirror sends more than LARGEST_BYTES."""


def fetch(
    target: Path,
    *,
    urls: Sequence[str],
    sha256: str,
    log: Callable[[str], None],
    progress: Progress = lambda *_: None,
    timeout_seconds: float = 30.0,
) -> None:
    """Download the file `target` with the given SHA-256 from the first of `urls` that serves it.

    An interrupted download stays as `target`.part and is resumed, also from another mirror. Bytes with a
    wrong hash are deleted. Raises DataError with each mirror and its reason, ToolkitError if the disk fails.
    """
    part, failures = target.with_name(target.name + ".part"), list[str]()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target):
            for url in urls if not target.exists() else ():
                if failures:  # the last one is part of the error
                    log(failures[-1])
                log(f"downloading {target.name} from {url}")
                transfer = partial(_transfer, url, part, progress=progress, timeout_seconds=timeout_seconds)
                try:
                    _complete(transfer, part, sha256)
                except _MirrorError as failure:
                    failures.append(f"{url}: {failure}")
                else:
                    atomic.publish(part, target)
                    break
            if target.exists():
                return
    except OSError as error:
        raise os_error("write", error, todo="free space or give write permission there") from error
    todo = f"look at the network of this machine, or put the file at {target}"
    raise DataError(f"cannot download {target.name}", why="; ".join(failures), todo=todo)


def _complete(transfer: Callable[[], None], part: Path, sha256: str) -> None:
    """Complete and verify `part`, resuming while there is progress. Raises _MirrorError."""
    tries, furthest = 0, _size(part)
    while True:
        start = _size(part)
        try:
            transfer()
        except _TooLargeError:
            part.unlink(missing_ok=True)
            raise
        except _MirrorError:
            tries = 0 if _size(part) > furthest else tries + 1
            furthest = max(furthest, _size(part))
            if tries >= _TRIES or furthest == 0:
                raise
            continue
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found == sha256:
            return
        part.unlink()
        if start == 0:
            raise _MirrorError(f"SHA-256 is {found}, not {sha256}; the download was deleted")
        # The bytes of an earlier start may be wrong: try once more from the beginning.
        furthest = 0


def _transfer(url: str, part: Path, *, progress: Progress, timeout_seconds: float) -> None:
    """Make one request: append what `part` lacks, or begin anew if the server does not resume."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416:
            raise _MirrorError(f"HTTP status {error.code} {error.reason}") from error
        # Nothing follows the bytes that are there: the file is complete or too long, which the hash tells.
        return
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorError(_reason(error)) from error
    with response:
        resumed = have > 0 and response.status == 206
        if resumed and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise _MirrorError("the server answered with another range than was asked for")
        done = have if resumed else 0
        length = response.headers.get("Content-Length", "")
        total = done + int(length) if length.isdigit() else 0
        _check_size(total)
        with atomic.naming(part), part.open("ab" if resumed else "wb") as file:
            progress(part.stem, done, total)
            for block in _blocks(response):
                done += len(block)
                _check_size(done)
                file.write(block)
                progress(part.stem, done, total)
    if done < total:
        raise _MirrorError(f"connection cut after {done} of {total} bytes")


def _check_size(size_bytes: int) -> None:
    if size_bytes > LARGEST_BYTES:
        raise _TooLargeError(f"it sends {size_bytes} bytes or more, and at most {LARGEST_BYTES} are taken")


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield what the server sends; network errors become _MirrorError, unlike errors of the disk."""
    try:
        while block := response.read(_BLOCK_BYTES):
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorError(_reason(error)) from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
