"""The run directory: the only file that knows its layout.

    runs/<model>/<utc>-<identity>/
        lock             held by the process that trains in it, released by the kernel when it dies
        status.json      running | done | failed | preempted, the reason, the last step, facts of the run
        config ...       the requested configuration and the plan: TEXTS and OBJECTS
        metrics.jsonl    flat rows
        log.txt          console output
        ckpt/            lib/runs/checkpoint.py
        plots/           scripts/plots.py
        sinks/           lib/runs/sinks: written from metrics.jsonl during the run
        tags.json        words of the user, by make tag
        report.html      by make report, with report.json: what it found out about the checkpoints

A directory is filled under a hidden name and then renamed, so that every visible run
has all its files. Times are taken from names, never from the file system.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from lib import atomic
from lib.errors import ConfigError, ToolkitError, os_error, os_errors

TEXTS = ("config", "defconfig")  # the whole .config and its minimal form
# Stored as NAME.json: typed values of symbols, and where they came from; decisions with reasons, and the
# hardware that they are for; facts about the data set, and all of it that predicting needs; package versions;
# hashes of the plug-ins' code.
OBJECTS = ("values", "origins", "plan", "hardware", "data", "preprocess", "env", "plugins")

STATUS, METRICS, LOCK, CHECKPOINTS, SINKS = "status.json", "metrics.jsonl", "lock", "ckpt", "sinks"
EVENTS = "events.out.tfevents."  # prefix by which TensorBoard recognizes event files

_TAGS = "tags.json"
_TAG = re.compile(r"[\w.+:/][\w.+:/-]*")
_NAME = re.compile(r"(?P<time>\d{8}T\d{6}Z)-(?P<identity>[0-9a-f]{8})(?:-(?P<ordinal>\d+))?")
_CHECKPOINT_NAME = re.compile(r"step-(\d{8,})")
_LISTED = 10
_TRIES = 10  # of a lock, in 0.2 s: `in_use` of a process that only reads holds a free one for a moment


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of one step."""
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """Return the step in a checkpoint's directory name, or None for any other name."""
    match = _CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) if match else None


def is_run_name(name: str) -> bool:
    """Return True for the name of a run directory that was not renamed."""
    return _NAME.fullmatch(name) is not None


State: TypeAlias = Literal["running", "done", "failed", "preempted", "killed", "unknown"]
Parsed = TypeVar("Parsed", dict[str, Any], list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The last recorded status of a run, the content of status.json.

    state:  "unknown" if status.json is missing or damaged; `reason` then says which. A run that
            was killed stays "running" and holds no lock; `lib.runs.index` calls it "killed".
    facts:  further facts of the run, such as its final metrics.
    """

    state: State
    reason: str = ""
    step: int = 0
    pid: int = 0
    host: str = ""
    time: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the numbers among the facts."""
        return {name: value for name, value in self.facts.items() if isinstance(value, int | float)}


class _Entry:
    """A path in the run directory, as a property of `RunDir`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, _: type[RunDir] | None = None) -> Path:
        return run.path / self._name


@dataclass(slots=True)
class RunDir:
    """One run directory. Make one with `create`, `open` or `find_interrupted`."""

    path: Path
    _lock: int | None = None

    config = _Entry("config")  # the whole .config
    minimal = _Entry("defconfig")  # the minimal configuration
    checkpoints = _Entry(CHECKPOINTS)
    metrics = _Entry(METRICS)
    log = _Entry("log.txt")
    plots = _Entry("plots")
    sinks = _Entry(SINKS)
    report = _Entry("report.html")
    findings = _Entry("report.json")

    @classmethod
    def create(
        cls, runs: Path, *, model: str, identity: str, files: Mapping[str, str | Mapping[str, Any]]
    ) -> RunDir:
        """Create a run in state "running", locked. `files`: a TEXTS name -> text, an OBJECTS name -> object.

        Raises ToolkitError if it cannot be written.
        """
        assert set(files) <= {*TEXTS, *OBJECTS} and "config" in files, sorted(files)
        temporary = cls(runs / model / f".new-{os.urandom(4).hex()}")
        with os_errors("create a run directory in", todo="O= names another place"):
            try:
                temporary.path.mkdir(parents=True)
                held = temporary._try_lock()
                assert held, "nobody else knows the name"
                for name, content in files.items():
                    atomic.write_new(temporary.path / _file_name(name), _text(content).encode())
                status = _status_text("running", 0, "", {})
                atomic.write_new(temporary.path / STATUS, status.encode())
                atomic.sync_directory(temporary.path)
                path = _rename_to_free_name(temporary.path, identity)
            except BaseException as error:
                temporary.release()
                shutil.rmtree(temporary.path, ignore_errors=True)
                if isinstance(error, OSError):
                    error.filename = str(runs / model)  # and no hidden name, which is gone
                raise
            atomic.sync_directory(path.parent)
        return cls(path, temporary._lock)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run without locking it. Raises ToolkitError if `path` is not a run."""
        if not (path / "config").is_file():
            raise ToolkitError(f"{path} is not a run directory", why="it has no file named config")
        return cls(path)

    @classmethod
    def find_interrupted(
        cls, runs: Path, *, model: str, is_same: Callable[[RunDir], bool], log: Callable[[str], object]
    ) -> RunDir | None:
        """Lock and return the newest unfinished run that `is_same` accepts; report runs that are in use."""
        for path in _entries(runs / model):
            lost = _NAME.fullmatch(path.name) and not RunDir(path).config.is_file()
            if lost and _entries(RunDir(path).checkpoints):
                log(f"{path} is not resumed: its file config is missing. Restore it, or remove the directory")
        same = [run for run in _runs(runs / model) if is_same(run)]
        for run in sorted(same, key=age, reverse=True):
            if not run._try_lock(tries=_TRIES):
                log(f"{run.path} has the same configuration and is in use by process {run.status().pid}")
            elif run.status().state != "done":
                return run
            else:
                run.release()
        return None

    @property
    def name(self) -> str:
        """The name of the directory, <utc>-<identity>."""
        return self.path.name

    @property
    def model(self) -> str:
        """The name of the model's directory, which holds this one."""
        return self.path.resolve().parent.name

    @property
    def identity(self) -> str:
        """The identity (lib.runs.identity) in the directory's name; empty if the name has another form."""
        match = _NAME.fullmatch(self.name)
        return match["identity"] if match else ""

    @property
    def began(self) -> float:
        """Creation time in seconds since the epoch, from the name; 0 if the directory was renamed."""
        match = _NAME.fullmatch(self.name)
        return datetime.strptime(match["time"], "%Y%m%dT%H%M%S%z").timestamp() if match else 0.0

    @property
    def checkpoint_steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending, valid or not. Raises ToolkitError."""
        found = (checkpoint_step(path.name) for path in _entries(self.checkpoints))
        return sorted(step for step in found if step is not None)

    @property
    def in_use(self) -> bool:
        """True while a process, maybe this one, holds the lock. Raises ToolkitError if it cannot be read."""
        if self._lock is None and self._try_lock():
            self.release()
            return False
        return True

    def tags(self) -> list[str]:
        """Return the tags of the run in alphabetical order. Raises ToolkitError as `read_json`."""
        return sorted(self._parsed(_TAGS, list)) if os.path.lexists(self.path / _TAGS) else []

    def tag(self, words: Sequence[str]) -> list[str]:
        """Add tags, and remove those that begin with a minus; return all.

        Raises ConfigError for a word that is no tag, ToolkitError if the file cannot be written.
        """
        tags = set(self.tags())
        for word in words:
            if not _TAG.fullmatch(word.removeprefix("-")):
                raise ConfigError(f"TAG={word} is not a tag", todo="use letters, digits and . _ + : / -")
            (tags.discard if word.startswith("-") else tags.add)(word.removeprefix("-"))
        self._replace(_TAGS, json.dumps(sorted(tags)) + "\n")
        return sorted(tags)

    def lock(self) -> None:
        """Lock the run for this process. Raises ToolkitError if another one holds the lock."""
        status = self.status()
        if not self._try_lock(tries=_TRIES):
            why = f"process {status.pid} on {status.host or 'this machine'} trains in it"
            raise ToolkitError(f"{self.path} is in use", why=why, todo="wait for it or stop it")

    def release(self) -> None:
        """Release the lock before this process ends."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def status(self) -> Status:
        """Read status.json. A missing or damaged file gives state "unknown" with the reason."""
        try:
            return Status(**json.loads((self.path / STATUS).read_bytes()))
        except FileNotFoundError:
            return Status(state="unknown", reason="status.json is missing")
        except OSError as error:
            raise os_error("read", error) from error
        except (ValueError, TypeError) as error:
            return Status(state="unknown", reason=f"status.json is damaged ({error})")

    def set_status(self, state: State, *, step: int, reason: str = "", **facts: Any) -> None:
        """Replace status.json. Non-finite numbers among `facts` become null. Raises ToolkitError."""
        odd = {name for name, value in facts.items() if isinstance(value, float) and not math.isfinite(value)}
        facts |= dict.fromkeys(odd)
        self._replace(STATUS, _status_text(state, step, reason, facts))

    def write(self, name: str, content: str | Mapping[str, Any]) -> None:
        """Replace one of TEXTS or OBJECTS. Raises ToolkitError if it cannot be written."""
        self._replace(_file_name(name), _text(content))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one of OBJECTS. Raises ToolkitError if it is missing or damaged."""
        return self._parsed(_file_name(name), dict)

    def _parsed(self, file_name: str, kind: type[Parsed]) -> Parsed:
        path = self.path / file_name
        try:
            with os_errors("read"):
                content = json.loads(path.read_bytes())
        except ValueError as error:
            raise ToolkitError(f"{path} is damaged", why=str(error)) from error
        if not isinstance(content, kind):
            raise ToolkitError(f"{path} is damaged", why="not a JSON " + {dict: "object", list: "list"}[kind])
        return content

    def _replace(self, file_name: str, text: str) -> None:
        with os_errors("write"):
            atomic.write_text(self.path / file_name, text)

    def _try_lock(self, *, tries: int = 1) -> bool:
        assert self._lock is None, "locked already"
        self._lock = atomic.try_lock(self.path / LOCK, tries=tries)
        return self._lock is not None


def resolve_run(runs: Path, name: str = "", *, unfinished: bool = False) -> RunDir:
    """Find the run that `name` selects; with `unfinished`, only among runs that are not done.

    `name` is a path, a directory name, "model/directory", a unique prefix of either, or "" for the
    newest run of all. Raises ConfigError, listing the candidates, if it does not select exactly one run.
    """
    if name and (Path(name) / "config").is_file():
        found, wanted = [RunDir(Path(name))], ""
    else:
        every = (run for model in _entries(runs) for run in _runs(model, optional=True))
        found = sorted(every, key=age, reverse=True)
        wanted = name.rstrip("/") or name
    missing = f"the directory {name} has no file called config" if name and Path(name).is_dir() else ""
    if not found:
        why = "it is not a directory" if os.path.lexists(runs) and not runs.is_dir() else missing
        requested = f"RUN={name}: " if name else ""
        raise ConfigError(f"{requested}there is no run in {runs}", why=why, todo="make one with make train")
    selectable = [run for run in found if not unfinished or run.status().state != "done"]
    matches = _matching(selectable, wanted)
    if not matches and _matching(found, wanted):
        what = f"RUN={name} is done" if name else "there is no run to resume: all are done"
        raise ConfigError(what, todo="start one with make train")
    if len(matches) == 1 or (matches and not wanted):
        return matches[0]
    listed = matches or selectable or found
    names = ", ".join(f"{run.model}/{run.name}" for run in listed[:_LISTED])
    more = f" and {len(listed) - _LISTED} more (ls {runs}/*)" if len(listed) > _LISTED else ""
    what = f"RUN={name} could be {len(matches)} runs" if matches else f"RUN={name} is not a run in {runs}"
    raise ConfigError(what, why="" if matches else missing, todo=f"choose one of {names}{more}")


def _matching(runs: list[RunDir], wanted: str) -> list[RunDir]:
    """Return the run of that name, or else those whose names have it as a prefix."""
    names = [(run, (run.name, f"{run.model}/{run.name}")) for run in runs]
    exact = [run for run, own in names if wanted in own]
    return exact or [run for run, own in names if any(name.startswith(wanted) for name in own)]


def _runs(model: Path, *, optional: bool = False) -> list[RunDir]:
    """Return the complete runs of one model. Runs that a user renamed can only be named by path."""
    found = (RunDir(path) for path in _entries(model, optional=optional) if _NAME.fullmatch(path.name))
    return [run for run in found if run.config.is_file()]


def _entries(directory: Path, *, optional: bool = False) -> list[Path]:
    """Return what is in a directory, sorted; nothing where there is none. Raises ToolkitError.

    optional: one that may not be listed is left out, with a note.
    """
    with os_errors("list"):
        try:
            return sorted(directory.iterdir()) if directory.is_dir() else []
        except PermissionError as error:
            if not optional:
                raise
            note_unreadable(str(directory), str(error.strerror))
            return []


@functools.cache  # once in a process: make watch looks again and again
def note_unreadable(directory: str, why: str) -> None:
    """Print that a directory cannot be listed, and why."""
    print(f"note: {directory} is left out: {why.lower()}", file=sys.stderr)


def age(run: RunDir) -> tuple[str, int, int]:
    """Sort key from old to new: by name; of runs created in the same second, the later suffix is newer."""
    match = _NAME.fullmatch(run.name)
    assert match, run.name
    step = max((checkpoint_step(path.name) or 0 for path in _entries(run.checkpoints)), default=0)
    return match["time"], step, int(match["ordinal"] or 1)


def _rename_to_free_name(temporary: Path, identity: str) -> Path:
    """Rename to <utc>-<identity>, with -2, -3 ... if another process took the name in this second."""
    name = f"{_now():%Y%m%dT%H%M%SZ}-{identity}"
    for ordinal in itertools.count(1):
        path = temporary.with_name(name if ordinal == 1 else f"{name}-{ordinal}")
        try:
            # The kernel refuses to rename a directory over a non-empty one, and a run is never empty.
            return temporary.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    raise AssertionError("itertools.count ends")


def _now() -> datetime:
    return datetime.now(UTC)


def _status_text(state: State, step: int, reason: str, facts: Mapping[str, Any]) -> str:
    now, pid, host = f"{_now():%Y-%m-%dT%H:%M:%SZ}", os.getpid(), socket.gethostname()
    status = Status(state=state, reason=reason, step=step, pid=pid, host=host, time=now, facts=facts)
    return _text(asdict(status))


def _text(content: str | Mapping[str, Any]) -> str:
    return content if isinstance(content, str) else json.dumps(content, indent=2, allow_nan=False) + "\n"


def _file_name(name: str) -> str:
    assert name in TEXTS or name in OBJECTS, name
    return f"{name}.json" if name in OBJECTS else name
