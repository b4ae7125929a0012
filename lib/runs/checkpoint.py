"""Atomic checkpoints: each one is complete or absent, even after a kill or a power cut.

    ckpt/step-00001234/state.pt        torch.save
    ckpt/step-00001234/manifest.json   step, versions, size and SHA-256 of every file, and of itself
    ckpt/latest, ckpt/best             text: the name of a directory above

A checkpoint is written under a hidden name, synced and renamed; one that is removed or replaced is renamed
to a hidden name first. A visible directory is therefore always complete, and the hidden leftovers of a dead
process are removed by the next save. The history is linear: saving a step drops later steps, which exist
only if they were damaged or the run resumed from an earlier step.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, cast

import torch
from torch import nn

from lib import atomic
from lib.errors import CheckpointError
from lib.runs.directory import checkpoint_name, checkpoint_step

_SAVING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"
_LEFTOVER = re.compile(r"\.(saving|replaced|removed)-step-\d+|\.(latest|best)\.[0-9a-f]+\.tmp")
_LEAVES = (
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    torch.Tensor,
    nn.Parameter,
    torch.Size,
    torch.dtype,
)

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.pt"  # the file that every checkpoint has


class DamagedError(Exception):
    """The reason why a checkpoint cannot be used."""


def save(directory: Path, *, step: int, state: Mapping[str, Any], keep_last: int, best: bool) -> Path:
    """Save `state` as the checkpoint of `step` and remove those older than the `keep_last` newest.

    state:  nested dicts, lists and tuples of tensors and plain values; anything else could not be loaded.
    best:   also point `best` here; the checkpoint that `best` points to is never removed for its age.

    Raises CheckpointError if it cannot be written; earlier checkpoints are then untouched.
    """
    assert step >= 0 and keep_last >= 1, (step, keep_last)
    _check_loadable(state, "state")
    with _staged(directory, step) as temporary:
        _write(temporary, step=step, state=state, best=best)
        path = _install(temporary, step=step, best=best)
        _retire(directory, steps(directory)[:-keep_last])
        _clean(directory)
    return path


def load(
    directory: Path,
    *,
    which: Literal["latest", "best"] | int = "latest",
    map_location: str | torch.device = "cpu",
    log: Callable[[str], object],
) -> tuple[int, dict[str, Any]] | None:
    """Return the step and state of a verified checkpoint, or None if there is none.

    "latest" falls back to the previous checkpoint, and reports it, until one is valid. "best" and a step
    number name exactly one checkpoint. Reads only: another process may be saving.

    Raises CheckpointError if the requested checkpoint is damaged or cannot be read.
    """
    try:
        found = _checkpoints(directory)
        candidates = _candidates(directory, which, found)
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}", why=error.strerror or str(error)) from error
    for step in candidates:
        try:
            return step, _read(found[step], step=step, map_location=map_location)
        except DamagedError as damage:
            log(f"warning: checkpoint {found[step].name} is damaged: {damage}")
    if not candidates:
        return None
    raise CheckpointError(
        f"no valid checkpoint in {directory}",
        why=f"damaged: {', '.join(found[step].name for step in candidates)}",
        todo="remove that directory to start again",
    )


def steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending. They are complete, but not verified."""
    return sorted(_checkpoints(directory))


def latest_valid(directory: Path) -> int | None:
    """Return the step of the latest valid checkpoint, or None if there is none."""
    found = _checkpoints(directory)
    for step in sorted(found, reverse=True):
        try:
            verify(found[step], step=step)
        except (DamagedError, OSError):
            continue  # load() reports the reason
        return step
    return None


def best_step(directory: Path) -> int | None:
    """Return the step that `best` points to, or None if it points to no checkpoint."""
    path = directory / "best"
    if not path.exists():
        return None
    return checkpoint_step(path.read_text(encoding="utf-8", errors="replace").strip())


def receive(directory: Path, *, step: int, fetch: Callable[[str, Path], object]) -> None:
    """Install the checkpoint of `step` from another place, such as remote storage.

    fetch: called with a file name in the checkpoint and the path to write it to.

    Raises DamagedError if the received files do not match the manifest, CheckpointError if they cannot be
    written, and whatever `fetch` raises. Earlier checkpoints are then untouched.
    """
    with _staged(directory, step) as temporary:
        for name in (MANIFEST, STATE):
            fetch(name, temporary / name)
        content = verify(temporary, step=step)
        for name in (MANIFEST, STATE):
            atomic.sync_file(temporary / name)
        atomic.sync_directory(temporary)
        _install(temporary, step=step, best=is_best(content))


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """Serialize a manifest, with its own checksum, to bytes."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def decode_manifest(data: bytes, *, step: int) -> dict[str, Any]:
    """Parse the manifest of `step`. Raises DamagedError if it belongs to another step or a byte differs."""
    try:
        content: dict[str, Any] = json.loads(data)
        content.pop("sha256")
        valid = data == encode_manifest(content)
    except (ValueError, TypeError, AttributeError, KeyError):
        valid = False
    if not valid:
        raise DamagedError(f"{MANIFEST} is not as it was written")
    if content.get("format") != FORMAT:
        raise DamagedError(f"its format is {content.get('format')}, this version reads {FORMAT}")
    if content.get("step") != step:
        raise DamagedError(f"it is the checkpoint of step {content.get('step')}")
    files = content.get("files")
    if not isinstance(files, dict) or STATE not in files or not all(map(_has_checksum, files.values())):
        raise DamagedError(f"{MANIFEST} does not give size and SHA-256 of {STATE}")
    return content


def _has_checksum(file: object) -> bool:
    return isinstance(file, dict) and {"size_bytes", "sha256"} <= set(file)


def is_best(content: Mapping[str, Any]) -> bool:
    """Return True if it was the best so far when saved; False for older manifests without this field."""
    return bool(content.get("best", False))


def verify(path: Path, *, step: int) -> dict[str, Any]:
    """Verify the files of the checkpoint in `path` against its manifest, and return the manifest.

    Raises DamagedError if a file differs, OSError if one cannot be read.
    """
    content = decode_manifest((path / MANIFEST).read_bytes(), step=step)
    for name, expected in content["files"].items():
        found_bytes = (path / name).stat().st_size
        if found_bytes != expected["size_bytes"]:
            raise DamagedError(f"{name} has {found_bytes} bytes, not {expected['size_bytes']}")
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise DamagedError(f"the SHA-256 of {name} differs")
    return content


@contextlib.contextmanager
def _staged(directory: Path, step: int) -> Iterator[Path]:
    """Yield a new hidden directory for a checkpoint, removed unless installed. Raises CheckpointError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _clean(directory)
        temporary = directory / (_SAVING + checkpoint_name(step))
        temporary.mkdir()
        try:
            yield temporary
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)
    except OSError as error:
        raise CheckpointError(
            f"cannot save a checkpoint in {error.filename or directory}",
            why=error.strerror or str(error),
            todo="earlier checkpoints are untouched",
        ) from error


class _HashingFile:
    """File object for torch.save that counts and hashes while writing, so that nothing is read again.

    An exception that crosses torch's C++ writer comes out as a different one, so the first
    error is kept and later writes are dropped.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
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
        return self._digest.hexdigest()


def _write(temporary: Path, *, step: int, state: Mapping[str, Any], best: bool) -> None:
    """Write a complete checkpoint to an empty directory and sync every file."""
    path = temporary / STATE
    with atomic.naming(path), path.open("wb") as file:
        hashing = _HashingFile(file)
        torch.save(dict(state), cast(IO[bytes], hashing))
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    content = {
        "format": FORMAT,
        "step": step,
        "best": best,
        "torch": torch.__version__,
        "files": {STATE: {"size_bytes": hashing.size_bytes, "sha256": hashing.sha256()}},
    }
    atomic.write_new(temporary / MANIFEST, encode_manifest(content))
    atomic.sync_directory(temporary)


def _install(temporary: Path, *, step: int, best: bool) -> Path:
    """Make a written checkpoint visible, replacing one of the same step and any later ones."""
    directory = temporary.parent
    later = [other for other in steps(directory) if other > step]
    if best_step(directory) in later:
        (directory / "best").unlink()
    for other in later:
        _hide(directory, other, _REMOVED)
    path = directory / checkpoint_name(step)
    if path.exists():
        _hide(directory, step, _REPLACED)
    temporary.rename(path)
    atomic.sync_directory(directory)
    atomic.write_text(directory / "latest", path.name + "\n")
    if best:
        atomic.write_text(directory / "best", path.name + "\n")
    return path


def _retire(directory: Path, old: list[int]) -> None:
    best = best_step(directory)
    for step in old:
        if step != best:
            _hide(directory, step, _REMOVED)
    atomic.sync_directory(directory)


def _hide(directory: Path, step: int, prefix: str) -> None:
    name = checkpoint_name(step)
    (directory / name).rename(directory / (prefix + name))


def _clean(directory: Path) -> None:
    """Remove hidden leftovers, except a replaced checkpoint whose replacement was never installed."""
    for path in directory.iterdir():
        original = directory / path.name.removeprefix(_REPLACED)
        if original != path and not original.exists():
            path.rename(original)
        elif _LEFTOVER.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _checkpoints(directory: Path) -> dict[int, Path]:
    """Return step -> directory. A replaced checkpoint counts until its replacement is installed."""
    found: dict[int, Path] = {}
    names = {path.name for path in directory.iterdir()} if directory.exists() else set()
    for name in names:
        visible = name.removeprefix(_REPLACED)
        step = checkpoint_step(visible)
        if step is not None and (name == visible or visible not in names):
            found[step] = directory / name
    return found


def _candidates(
    directory: Path, which: Literal["latest", "best"] | int, found: Mapping[int, Path]
) -> list[int]:
    """Return the steps to try, in order."""
    if which == "latest":
        return sorted(found, reverse=True)
    step = best_step(directory) if which == "best" else which
    if step is None and (directory / "best").exists():
        raise CheckpointError(f"{directory / 'best'} does not name a checkpoint", todo="use the latest one")
    if step is None:
        return []
    if step not in found:
        available = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(f"no checkpoint of step {step} in {directory}", why=f"available: {available}")
    return [step]


def _read(path: Path, *, step: int, map_location: str | torch.device) -> dict[str, Any]:
    """Return the state of one checkpoint after verifying every byte."""
    try:
        verify(path, step=step)
        if not _is_saved_by_torch(path / STATE):
            raise DamagedError(f"{STATE} is not a file of torch.save")
        state: dict[str, Any] = torch.load(path / STATE, map_location=map_location, weights_only=True)
    except OSError as error:
        raise DamagedError(f"{Path(error.filename or path).name}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise DamagedError(f"{STATE} holds more than tensors and numbers") from error
    if not isinstance(state, dict):
        raise DamagedError(f"{STATE} holds no dict of states")
    return state


def _is_saved_by_torch(path: Path) -> bool:
    """Return True if torch.load has a pickle to read there; its own error for this has no specific class."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/data.pkl") for name in archive.namelist())


def _check_loadable(value: object, where: str) -> None:
    """Refuse a state that could be saved but not loaded, before it is saved."""
    if type(value) in (dict, collections.OrderedDict) and isinstance(value, dict):
        for key, item in value.items():
            _check_loadable(key, f"a key of {where}")
            _check_loadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple) and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_loadable(item, f"{where}[{index}]")
    elif type(value) not in _LEAVES:
        raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold")
