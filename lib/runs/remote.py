"""Runs on object storage, which cannot rename: a checkpoint exists once its manifest does.

    URL/<model>/<run>/config ...                      the files of the run directory
    URL/<model>/<run>/sinks/events...                 TensorBoard event files
    URL/<model>/<run>/ckpt/step-00001234/state.pt     first, with the other files of a sharded checkpoint
    URL/<model>/<run>/ckpt/step-00001234/manifest.json   last

The remote manifests are read anew each time to decide which checkpoints to keep and which is the best.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import CheckpointError, os_errors
from lib.kconf import Resolved, Value, values_from_json
from lib.runs import checkpoint
from lib.runs.checkpoint import MANIFEST, DamagedError, decode_manifest
from lib.runs.directory import (
    CHECKPOINTS,
    EVENTS,
    LOCK,
    SINKS,
    STATUS,
    RunDir,
    checkpoint_name,
    checkpoint_step,
)
from lib.runs.identity import is_identity
from lib.runs.storage import MissingError, Storage

_CONCURRENT_REQUESTS = 16


def contents(run: RunDir) -> dict[str, bytes]:
    """Read the files of a run directory and its event files, without checkpoints and files made from them."""
    files = [path for path in run.path.iterdir() if path.is_file() and not path.name.startswith(".")]
    files = [path for path in files if path.name != LOCK] + sorted(run.sinks.glob(f"{EVENTS}*"))
    return {path.relative_to(run.path).as_posix(): path.read_bytes() for path in files}


@dataclass(frozen=True, slots=True)
class RemoteRun:
    """One run on storage. All methods raise StorageError if the storage fails."""

    name: str
    storage: Storage  # at the run's own URL

    def is_done(self) -> bool:
        """Return True if the stored status says "done"; False if it is missing or damaged."""
        try:
            return bool(json.loads(self.storage.read(STATUS))["state"] == "done")
        except (MissingError, ValueError, KeyError, TypeError):
            return False

    def trains(self, resolved: Resolved) -> bool:
        """Same as `RunDir.trains`, for a remote run."""
        known = RunDir(Path(self.name)).identity
        return bool(known) and is_identity(known, resolved, stored=self._values)

    def _values(self) -> dict[str, Value] | None:
        try:
            return values_from_json(json.loads(self.storage.read("values.json")))
        except (MissingError, ValueError, AttributeError):
            return None  # without them only a current identity can match

    def manifests(self) -> dict[int, dict[str, Any]]:
        """Return step -> content of the valid manifests."""
        found = {}
        for step in self._folders():
            try:
                found[step] = decode_manifest(self.storage.read(_key(step, MANIFEST)), step=step)
            except (MissingError, DamagedError):
                continue  # an interrupted copy, or one of another version
        return found

    def copy(self, directory: Path, files: Mapping[str, bytes], *, keep_last: int) -> str:
        """Upload the latest and the best checkpoint of `directory`, unless they are there, and `files`.

        Removes remote checkpoints that are older than the `keep_last` newest, incomplete, or from a history
        that was dropped. Returns the damage of the best checkpoint on disk, "" if it is valid.

        Raises FileNotFoundError if a checkpoint was removed from the disk meanwhile, for a newer one;
        CheckpointError if the newest one is damaged, after everything else was uploaded.
        """
        local = checkpoint.steps(directory)
        wanted = [step for step in local if step in (local[-1], checkpoint.best_step(directory))]
        remote, missing, damaged = self.manifests(), dict[int, tuple[bytes, list[str]]](), dict[int, str]()
        for step in wanted:
            try:
                data, content = _manifest(directory / checkpoint_name(step), step=step)
            except DamagedError as damage:
                damaged[step] = f"checkpoint {checkpoint_name(step)} in {directory} is damaged: {damage}"
            else:
                if remote.get(step) != content:
                    missing[step] = data, [*content["files"]]
        for step, (_, names) in missing.items():
            self.storage.remove(_key(step, MANIFEST))
            for path in (directory / checkpoint_name(step) / name for name in names):
                try:
                    self.storage.upload(path, _key(step, path.name))
                except MissingError:
                    path.stat()  # raises if it is this one that has gone
                    raise
        for name, data in files.items():
            if name != STATUS:
                self.storage.write(name, data)
        for name in set(self._events()) - files.keys():
            self.storage.remove(name)
        for step, (data, _) in missing.items():
            self.storage.write(_key(step, MANIFEST), data)
        if local and local[-1] in damaged:
            raise CheckpointError(damaged[local[-1]])
        # Last, because a status "done" promises that the last checkpoint is there.
        self.storage.write(STATUS, files[STATUS])
        if local:
            self._retire(newest=local[-1], keep_last=keep_last)
        return "".join(damaged.values())

    def fetch(self, run: RunDir, *, log: Callable[[str], object]) -> None:
        """Download the latest valid checkpoint, the files and the best one, unless `run` has one as new.

        Damaged remote checkpoints are reported and the previous one is taken. Raises CheckpointError if all
        are damaged and `run` has no valid one of its own, ToolkitError if the disk fails.
        """
        local, own = checkpoint.steps(run.checkpoints), checkpoint.latest_valid(run.checkpoints)
        remote = self.manifests()
        newer = sorted(step for step in remote if own is None or step > own)
        if not newer:
            return
        # First, because rows after the checkpoint's step can be dropped later, missing ones cannot be made.
        self._fetch_files(run.path)
        best = _best(remote)
        # In ascending order, because installing a step drops later ones.
        has_best = best is not None and best in newer[:-1] and self._receive(run.checkpoints, best, log)
        for step in reversed(newer):
            if (has_best and step == best) or self._receive(run.checkpoints, step, log):
                why = ", because the latest local one is damaged" if local and local[-1] != own else ""
                log(f"Checkpoint {checkpoint_name(step)} comes from {self.storage.url}{why}")
                return
        if own is None:
            raise CheckpointError(
                f"no valid checkpoint in {self.storage.url}",
                why=f"damaged: {', '.join(map(checkpoint_name, newer))}",
                todo="remove that folder to start again",
            )

    def adopt(self, runs: Path, *, log: Callable[[str], object]) -> RunDir:
        """Create its run directory in the model's `runs`, with a checkpoint; locked. Raises ToolkitError."""
        run = RunDir(runs / f".fetching-{self.name}")
        with os_errors(f"fetch {self.storage.url} to"):
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            try:
                self.fetch(run, log=log)
                run.path = run.path.rename(runs / self.name)
                atomic.sync_directory(runs)
            except BaseException:
                run.release()
                raise
        return run

    def _fetch_files(self, directory: Path) -> None:
        names = [name for name in self.storage.entries() if not name.startswith(".")]
        for name in [name for name in names if name not in (CHECKPOINTS, SINKS, LOCK)] + self._events():
            path = directory / name
            temporary = path.with_name(f".{path.name}.fetched")
            with os_errors("write"):
                path.parent.mkdir(exist_ok=True)
                self.storage.download(name, temporary)
                atomic.publish(temporary, path)

    def _events(self) -> list[str]:
        """Names of the remote event files."""
        return [f"{SINKS}/{name}" for name in self.storage.entries(SINKS) if name.startswith(EVENTS)]

    def _receive(self, directory: Path, step: int, log: Callable[[str], object]) -> bool:
        def download(name: str, path: Path) -> None:
            try:
                self.storage.download(_key(step, name), path)
            except MissingError as error:
                raise DamagedError(f"{name} is missing") from error

        try:
            checkpoint.receive(directory, step=step, fetch=download)
        except DamagedError as damage:
            log(f"warning: checkpoint {checkpoint_name(step)} in {self.storage.url} is damaged: {damage}")
            return False
        return True

    def _retire(self, *, newest: int, keep_last: int) -> None:
        remote = {step: content for step, content in self.manifests().items() if step <= newest}
        keep = {*sorted(remote)[-keep_last:], _best(remote)}
        for step in self._folders():
            if step not in keep:
                self.storage.remove(_key(step, MANIFEST))
                self.storage.remove(_key(step))

    def _folders(self) -> list[int]:
        steps = map(checkpoint_step, self.storage.entries(CHECKPOINTS))
        return [step for step in steps if step is not None]


def unfinished(storage: Storage, resolved: Resolved) -> list[RemoteRun]:
    """Return a model's unfinished runs that train `resolved`, from old to new. Raises StorageError."""
    found = [RemoteRun(name, storage.below(name)) for name in storage.entries()]
    # Each run of another configuration costs a request, which is slow one by one where there are hundreds.
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        wanted = pool.map(lambda run: run.trains(resolved) and not run.is_done(), found)
        return [run for run, is_wanted in zip(found, wanted, strict=True) if is_wanted]


def _manifest(path: Path, *, step: int) -> tuple[bytes, dict[str, Any]]:
    """Return bytes and content of a local manifest. Raises DamagedError, FileNotFoundError if all is gone."""
    try:
        data = (path / MANIFEST).read_bytes()
    except OSError as error:
        if not path.is_dir():  # checkpoints are removed as a whole
            raise
        raise DamagedError(f"{MANIFEST}: {error.strerror or error}") from error
    return data, decode_manifest(data, step=step)


def _key(step: int, name: str = "") -> str:
    return "/".join(filter(None, (CHECKPOINTS, checkpoint_name(step), name)))


def _best(manifests: Mapping[int, Mapping[str, Any]]) -> int | None:
    """The step of the best checkpoint: the last one marked so, as each was better than those before."""
    return max((step for step, content in manifests.items() if checkpoint.is_best(content)), default=None)
