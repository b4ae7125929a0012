"""Fetch a file from the first mirror that gives it whole: resumed, verified, renamed only then."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from lib import atomic
from lib.data.cache import exclusive
from lib.errors import DataError, os_error

# Called with the file's name, the bytes so far, and the bytes in all (0 where the server does not say).
Progress: TypeAlias = Callable[[str, int, int], None]

_BLOCK_BYTES = 1 << 18
LARGEST_BYTES = 2**30  # no file of the catalogue is larger; more fills the disk for nothing
_TRIES = 3  # on one mirror, and again whenever a try got further


class _MirrorError(Exception):
    """This mirror failed; the text says why."""


class _TooLargeError(_MirrorError):
    """It sends more than any file that is asked for has."""


def fetch(
    target: Path,
    *,
    urls: Sequence[str],
    sha256: str,
    say: Callable[[str], None],
    progress: Progress | None = None,
    timeout_seconds: float = 30.0,
) -> None:
    """Have the file `target`, with the given SHA-256, from the first of `urls` that serves it.

    An interrupted download stays as `target`.part and is resumed, also from another mirror. Bytes with
    a wrong hash are deleted. Nothing is called `target` before its hash was right. Raises DataError
    that names each mirror and its reason, ToolkitError where the disk fails.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(target):
            if not target.exists():
                _fetch(target, urls, sha256, say, progress or _ignore, timeout_seconds)
    except OSError as error:
        raise os_error("write", error, todo="free space or give write permission there") from error


def _ignore(name: str, done: int, total: int) -> None:
    pass


def _fetch(
    target: Path,
    urls: Sequence[str],
    sha256: str,
    say: Callable[[str], None],
    progress: Progress,
    timeout_seconds: float,
) -> None:
    part = target.with_name(target.name + ".part")
    failures: list[str] = []
    for url in urls:
        if failures:  # the last one is told by the error
            say(failures[-1])
        say(f"downloading {target.name} from {url}")
        try:
            _from_mirror(url, part, sha256, progress=progress, timeout_seconds=timeout_seconds)
        except _MirrorError as failure:
            failures.append(f"{url}: {failure}")
        else:
            atomic.publish(part, target)
            return
    raise DataError(f"cannot download {target.name}", why="; ".join(failures))


def _from_mirror(url: str, part: Path, sha256: str, *, progress: Progress, timeout_seconds: float) -> None:
    """Complete and verify `part`, or raise _MirrorError. A cut connection is resumed while that helps."""
    tries, furthest = 0, _size(part)
    while True:
        begun = _size(part)
        try:
            _transfer(url, part, progress=progress, timeout_seconds=timeout_seconds)
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
        if begun == 0:
            raise _MirrorError(f"SHA-256 is {found}, not {sha256}; the download was deleted")
        # The bytes that were there before may be what is wrong: once more from the start.
        furthest = 0


def _transfer(url: str, part: Path, *, progress: Progress, timeout_seconds: float) -> None:
    """One request: append what `part` lacks, or begin anew where the server does not resume."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416:
            raise _MirrorError(f"HTTP status {error.code} {error.reason}") from error
        # Nothing comes after what is there: it is complete, or longer than the file. The hash tells.
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
    """What the server sends. Errors of the network are the mirror's; errors of the disk are not met here."""
    try:
        while block := response.read(_BLOCK_BYTES):
            yield block
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorError(_reason(error)) from error


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return str(reason) or type(error).__name__


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
