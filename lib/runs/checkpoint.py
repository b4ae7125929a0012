"""Atomic checkpoints: each one is complete or absent, even after a kill or a power cut.

    ckpt/step-00001234/state.pt        torch.save; of a sharded checkpoint all but the sharded tensors
    ckpt/step-00001234/__0_0.distcp    sharded tensors of rank 0, and so on, with .metadata: lib/runs/dcp.py
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import nn

from lib import atomic
from lib.errors import CheckpointError
from lib.runs.directory import checkpoint_name, checkpoint_step

_SAVING, _REPLACED, _REMOVED = ".saving-", ".replaced-", ".removed-"
_LEFTOVER = re.compile(r"\.(saving|replaced|removed)-step-\d+|\.(latest|best)\.[0-9a-f]+\.tmp")
_LEAVES = (type(None), bool, int, float, str, bytes, torch.Tensor, nn.Parameter, torch.Size, torch.dtype)

Which: TypeAlias = Literal["latest", "best"] | int
Files: TypeAlias = Mapping[str, Mapping[str, Any]]  # name -> size_bytes and sha256
Writer: TypeAlias = Callable[[Path], Files]  # of files in a folder

FORMAT, SHARDED_FORMAT = 1, 2
MANIFEST = "manifest.json"
STATE = "state.pt"  # the file that every checkpoint has


class DamagedError(Exception):
    """The reason why a checkpoint cannot be used."""


class _Ranks(Protocol):
    """The part of a Backend by which processes agree on a checkpoint."""

    rank: int
    world: int

    def broadcast(self, value: Any) -> Any: ...

    def all_reduce_max(self, values: Sequence[float]) -> list[float]: ...


def save(
    directory: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    keep_last: int,
    best: bool,
    write_shards: Writer | None = None,
) -> Path:
    """Save `state` as the checkpoint of `step` and remove those older than the `keep_last` newest.

    state:  nested dicts, lists and tuples of tensors and plain values; anything else could not be loaded.
    best:   also point `best` here; the checkpoint that `best` points to is never removed for its age.
    write_shards:   writes the tensors that are meta tensors in `state` to the folder `staging` (`dcp.write`).

    Raises CheckpointError if it cannot be written; earlier checkpoints are then untouched.
    """
    assert step >= 0 and keep_last >= 1, (step, keep_last)
    _check_loadable(state, "state")
    with _staged(directory, step) as temporary:
        files = write_shards(temporary) if write_shards is not None else {}
        _write(temporary, step=step, state=state, best=best, shards=files)
        path = _install(temporary, step=step, best=best)
        kept = {*steps(directory)[-keep_last:], best_step(directory)}
        for old in steps(directory):
            if old not in kept:
                _hide(directory, old, _REMOVED)
        atomic.sync_directory(directory)
        _clean(directory)
    return path


def load(
    directory: Path,
    *,
    which: Which = "latest",
    map_location: str | torch.device = "cpu",
    log: Callable[[str], object],
    ranks: _Ranks | None = None,
    todo: str = "",
) -> tuple[int, dict[str, Any]] | None:
    """Return the step and state of a verified checkpoint, or None if there is none.

    "latest" falls back to the previous checkpoint, and reports it, until one is valid. "best" and a step
    number name exactly one checkpoint. Reads only: another process may be saving. Of a sharded checkpoint
    the state has StoredTensors (`lib.runs.dcp`), which are read when they are used.

    ranks: all processes load the same checkpoint, and each verifies some of its files; a collective.
    todo: what to do where all that could be loaded are damaged.

    Raises CheckpointError if the requested checkpoint is damaged or cannot be read.
    """
    if ranks is None:
        candidates = _candidates(directory, which)
    else:  # what another rank sees of a shared directory may be older, or an error of its own
        candidates = ranks.broadcast(_candidates(directory, which) if ranks.rank == 0 else None)
    for step, path in candidates.items():
        try:
            return step, _read(path, step=step, map_location=map_location, ranks=ranks)
        except DamagedError as damage:
            log(f"warning: checkpoint {path.name} is damaged: {damage}")
    if not candidates:
        return None
    kind, names = "best " if which == "best" else "", ", ".join(path.name for path in candidates.values())
    raise CheckpointError(f"no valid {kind}checkpoint in {directory}", why=f"damaged: {names}", todo=todo)


def steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending. They are complete, but not verified."""
    return sorted(_checkpoints(directory))


def latest_valid(directory: Path) -> int | None:
    """Return the step of the latest valid checkpoint, or None if there is none."""
    found = _checkpoints(directory)
    for step in sorted(found, reverse=True):
        with contextlib.suppress(DamagedError, OSError):  # load() reports the reason
            verify(found[step], step=step)
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
        fetch(MANIFEST, temporary / MANIFEST)
        names = [*decode_manifest((temporary / MANIFEST).read_bytes(), step=step)["files"]]
        for name in names:
            fetch(name, temporary / name)
        content = verify(temporary, step=step)
        for name in (MANIFEST, *names):
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
    if content.get("format") not in (FORMAT, SHARDED_FORMAT):
        raise DamagedError(f"its format is {content.get('format')}, this version reads 1 and 2")
    if content.get("step") != step:
        raise DamagedError(f"it is the checkpoint of step {content.get('step')}")
    files: Any = content.get("files")
    entries = files.values() if isinstance(files, dict) and STATE in files else [None]
    if not all(isinstance(entry, dict) and {"size_bytes", "sha256"} <= entry.keys() for entry in entries):
        raise DamagedError(f"{MANIFEST} does not give size and SHA-256 of {STATE}")
    if any(
        name in ("", "..") or "\0" in name or Path(name).name != name for name in files
    ):  # it would be written elsewhere when it is received
        raise DamagedError(f"{MANIFEST} names a file of another directory")
    return content


def is_best(content: Mapping[str, Any]) -> bool:
    """Return True if it was the best so far when saved; False for older manifests without this field."""
    return bool(content.get("best", False))


def verify(path: Path, *, step: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Return the manifest of the checkpoint in `path`. Raises DamagedError if a file differs, OSError.

    rank, world: of a process that verifies only its share of the files.
    """
    content = decode_manifest((path / MANIFEST).read_bytes(), step=step)
    for name, expected in sorted(content["files"].items())[rank::world]:
        found_bytes = (path / name).stat().st_size
        if found_bytes != expected["size_bytes"]:
            raise DamagedError(f"{name} has {found_bytes} bytes, not {expected['size_bytes']}")
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise DamagedError(f"the SHA-256 of {name} differs")
    return content


def staging(directory: Path, step: int) -> Path:
    """Return the hidden folder that a checkpoint is written to before it is installed."""
    return directory / (_SAVING + checkpoint_name(step))


@contextlib.contextmanager
def _staged(directory: Path, step: int) -> Iterator[Path]:
    """Yield a new hidden directory for a checkpoint, removed unless installed. Raises CheckpointError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _clean(directory)
        temporary = staging(directory, step)
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


def _write(temporary: Path, *, step: int, state: Mapping[str, Any], best: bool, shards: Files) -> None:
    """Write the rest of a checkpoint to a directory that has only `shards`, and sync every file."""
    path = temporary / STATE
    with atomic.naming(path), path.open("wb") as file:
        hashing = atomic.HashingFile(file)
        torch.save(dict(state), cast(IO[bytes], hashing))
        if hashing.error is not None:
            raise hashing.error
        file.flush()
        os.fsync(file.fileno())
    content = {
        "format": SHARDED_FORMAT if shards else FORMAT,
        "step": step,
        "best": best,
        "torch": torch.__version__,
        "files": {STATE: {"size_bytes": hashing.size_bytes, "sha256": hashing.sha256()}, **shards},
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
    names = {path.name for path in directory.iterdir()} if directory.exists() else set()
    visible = {name: name.removeprefix(_REPLACED) for name in names}
    there = {name: checkpoint_step(of) for name, of in visible.items() if name == of or of not in names}
    return {step: directory / name for name, step in there.items() if step is not None}


def _candidates(directory: Path, which: Which) -> dict[int, Path]:
    """Return step -> directory of the checkpoints to try, in order. Raises CheckpointError."""
    try:
        found = _checkpoints(directory)
        if which == "latest":
            return dict(sorted(found.items(), reverse=True))
        step = best_step(directory) if which == "best" else which
        if step is None and (directory / "best").exists():
            raise CheckpointError(f"{directory}/best does not name a checkpoint", todo="use the latest one")
    except OSError as error:
        raise CheckpointError(f"cannot read {directory}", why=error.strerror or str(error)) from error
    if step is None:
        return {}
    if step not in found:
        available = ", ".join(map(str, sorted(found))) or "none"
        raise CheckpointError(f"no checkpoint of step {step} in {directory}", why=f"available: {available}")
    return {step: found[step]}


def _read(path: Path, *, step: int, map_location: str | torch.device, ranks: _Ranks | None) -> dict[str, Any]:
    """Return the state of one checkpoint after verifying every byte. Raises DamagedError, on every rank."""
    own = {} if ranks is None else {"rank": ranks.rank, "world": ranks.world}
    try:
        content = _on_every_rank(lambda: verify(path, step=step, **own), path, ranks)
    except DamagedError:
        if ranks is not None and ranks.rank == 0:  # to report what another rank has found
            _on_every_rank(lambda: verify(path, step=step), path, None)
        raise
    # Not before every rank has verified its share: a damaged archive has errors of any kind.
    return _on_every_rank(lambda: _load(path, content, map_location), path, ranks)


def _on_every_rank(read: Callable[[], dict[str, Any]], path: Path, ranks: _Ranks | None) -> dict[str, Any]:
    """Return what `read` returns. Raises DamagedError, on every rank, if the checkpoint cannot be used."""
    found, reason = dict[str, Any](), ""
    try:
        found = read()
    except DamagedError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{Path(error.filename or path).name}: {error.strerror or error}"
    except pickle.UnpicklingError:
        reason = "it holds more than tensors and numbers"
    if any((bool(reason),) if ranks is None else ranks.all_reduce_max((bool(reason),))):
        raise DamagedError(reason or "another process cannot read it")
    return found


def _load(path: Path, content: Mapping[str, Any], map_location: Any) -> dict[str, Any]:
    """Load a verified checkpoint with this manifest. Raises DamagedError, OSError, UnpicklingError."""
    if not _is_saved_by_torch(path / STATE):
        raise DamagedError(f"{STATE} is not a file of torch.save")
    state: dict[str, Any] = torch.load(path / STATE, map_location=map_location, weights_only=True)
    if not isinstance(state, dict):
        raise DamagedError(f"{STATE} holds no dict of states")
    if content["format"] == FORMAT:
        return state
    from lib.runs import dcp  # a second, which other checkpoints do without

    return dcp.stored_tensors(state, path)


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
