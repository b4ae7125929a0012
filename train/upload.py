"""Copies of runs on object storage: resuming from them, and copying during training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from lib.config import Config
from lib.errors import CheckpointError, ConfigError
from lib.kconf import Resolved
from lib.runs import checkpoint
from lib.runs.directory import RunDir
from lib.runs.identity import trains
from lib.runs.remote import RemoteRun, contents, unfinished
from lib.runs.storage import Storage, StorageError, open_storage

Log = Callable[[str], object]

_REPORT_AFTER_SECONDS = 2.0  # before a wait is reported


def check_storage(config: Config) -> None:
    """Check that the requested storage can be written, read and cleaned up. Raises ConfigError."""
    if not config.checkpoints.checkpoint_url:
        return
    try:
        _storage(config).check()
    except StorageError as error:
        requested = f'CONFIG_CHECKPOINT_URL="{config.checkpoints.checkpoint_url}" cannot be used'
        raise ConfigError(requested, why=str(error)) from error


def interrupted(config: Config, resolved: Resolved, *, runs: Path, log: Log) -> RunDir | None:
    """Return the run of this configuration to resume, locked: on disk, or from storage if that is further.

    Raises ToolkitError if the storage fails or has damaged checkpoints only.
    """
    same = partial(trains, resolved=resolved)
    run = RunDir.find_interrupted(runs, model=config.model, is_same=same, log=log)
    if not config.checkpoints.checkpoint_url:
        return run
    if run is not None:
        catch_up(run, config, log=log)
    reached = max(checkpoint.steps(run.checkpoints), default=0) if run is not None else 0
    here = runs / config.model
    # Local runs are handled above, or are in use or done.
    others = unfinished(_storage(config).below(config.model), resolved)
    others = [other for other in others if not (here / other.name).exists()]
    further = [other for other in others if max(other.manifests(), default=0) > reached]
    if not further:
        return run
    if run is not None:
        run.release()
    return further[-1].adopt(here, log=log)


def catch_up(run: RunDir, config: Config, *, log: Log) -> RunDir:
    """Fetch the checkpoint of a run, if the copy on storage is further or the only one. Returns the run.

    Raises ToolkitError if the storage fails.
    """
    if config.checkpoints.checkpoint_url:
        _remote(run, config).fetch(run, log=log)
    return run


class Copier:
    """Background thread that copies a run to storage, one copy at a time.

    A newer request replaces one that waits. Only `wait` blocks; a process that exits cuts a copy off.
    """

    def __init__(self, run: RunDir, config: Config) -> None:
        self.url = f"{config.checkpoints.checkpoint_url.rstrip('/')}/{run.model}/{run.name}"
        self._run, self._remote, self._keep_last = run, _remote(run, config), config.checkpoints.keep_last
        self._lock = threading.Lock()
        self._wanted: Mapping[str, bytes] | None = None
        self._thread: threading.Thread | None = None
        self._news: deque[str] = deque()
        self._failure = ""  # why the last copy failed
        self._damage = ""  # of the best checkpoint, which the last copy omits
        self._copied = False  # True if the last requested copy is complete

    def begin(self) -> None:
        """Copy the run as it is now: its current files, its latest and its best checkpoint."""
        files = contents(self._run)
        with self._lock:
            self._wanted, self._copied = files, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="copy", daemon=True)
                self._thread.start()

    def news(self) -> list[str]:
        """Return messages for the user since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def wait(self, log: Log) -> str:
        """Wait until no copy is running; return why the copy is incomplete, "" if it is complete."""
        if (thread := self._thread) is not None:
            thread.join(_REPORT_AFTER_SECONDS)
            if thread.is_alive():
                log(f"Waiting for the copy to {self.url}")
                thread.join()
        return "" if self._copied else self._failure or "the copy was interrupted"

    def _work(self) -> None:
        try:
            while (files := self._take()) is not None:
                self._copy(files)
        except BaseException:
            with self._lock:
                self._thread = None
            raise

    def _take(self) -> Mapping[str, bytes] | None:
        with self._lock:
            files, self._wanted = self._wanted, None
            if files is None:
                self._thread = None
            return files

    def _copy(self, files: Mapping[str, bytes]) -> None:
        try:
            damage = self._remote.copy(self._run.checkpoints, files, keep_last=self._keep_last)
        except FileNotFoundError:
            return  # the disk has a newer one by now, which is requested next
        except (StorageError, CheckpointError) as error:
            if not self._failure:
                self._news.append(f"Not copied to {self.url}, which the next checkpoint tries again: {error}")
            self._failure = str(error)
            return
        if self._failure:
            self._news.append(f"Copied to {self.url} again")
        if damage and damage != self._damage:
            self._news.append(f"The best checkpoint is not copied: {damage}")
        self._failure, self._damage = "", damage
        with self._lock:
            self._copied = self._wanted is None


def _storage(config: Config) -> Storage:
    return open_storage(config.checkpoints.checkpoint_url, requested="CONFIG_CHECKPOINT_URL")


def _remote(run: RunDir, config: Config) -> RemoteRun:
    return RemoteRun(run.name, _storage(config).below(config.model).below(run.name))
