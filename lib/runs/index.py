"""Index of all run directories: one row for each run, and the filters of `make runs`.

The index is a file of rows beside the runs. A row is read again where its run has changed since: the
modification time of its directory, which changes with every file that is replaced in it (as its tags are),
or the time or size of its metrics or status. A run that may still grow is always read again. Values of
options are stored as differences from the first run of the same model, since 10,000 runs share most of them.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import operator
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from lib import atomic
from lib.errors import ConfigError, ToolkitError, meant
from lib.runs.directory import LOCK, METRICS, STATUS, RunDir, Status, is_run_name, note_unreadable
from lib.runs.metrics import higher_is_better, parse_row, preferred

T = TypeVar("T")

INDEX = ".index.json"
_VERSION = 4
_ELSEWHERE = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ESTALE, errno.EIO}  # of a folder, not of all
_DEPTH = 5  # below the folder of runs: runs/sweeps/NAME/IDENTITY/MODEL/RUN
_CLOCK_NS = 2_000_000_000  # a change this soon before the index was written may have the same time
_COMPARE = {"<=": operator.le, ">=": operator.ge, "=": operator.eq, "<": operator.lt, ">": operator.gt}
_MAY_CHANGE = ("running", "killed", "unknown")  # states of runs that change without their directory
_NUMBER_OR_PATTERN = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf|nan|.*[*?].*", re.IGNORECASE)
_CONDITION = re.compile(r"(\w+)(!=|<=|>=|=|<|>)(.*)")
ALIASES = {"lr": "LEARNING_RATE", "epochs": "NUM_EPOCHS", "steps": "MAX_STEPS"}
ALIASES |= {"batch": "effective_batch", "time": "seconds"}  # heads of columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. run: its directory, relative to the folder of runs.

    state: of its status; "killed" where it is "running" and no process holds its lock. reason: of its end.
    best, best_step: best value of `metric` among the evaluations, None without one.
    damaged: files that are missing or cannot be read, with the first bad line; other fields hold the rest.
    metrics: of the last evaluation. began: in UTC. seconds: of training, None until it ends.
    values: symbol -> value of the requested configuration.
    """

    run: str
    state: str
    reason: str
    model: str
    data: str
    identity: str
    began: str
    step: int
    seconds: float | None
    effective_batch: int | None
    metric: str
    best: float | None
    best_step: int | None
    metrics: Mapping[str, float]
    tags: tuple[str, ...]
    damaged: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name, without copies of what they hold."""
        return {name: getattr(self, name) for name in self.__slots__}

    def value(self, key: str) -> Any:
        """Return the field, metric, or value of a symbol called `key`; None without one."""
        name = ALIASES.get(key, key)
        if name in _FIELDS:
            return getattr(self, name)
        if name == self.metric:
            return self.best
        if name in self.metrics:
            return self.metrics[name]
        return self.values.get(name.removeprefix("CONFIG_").upper())


_FIELDS = tuple(name for name in Row.__dataclass_fields__ if name not in ("metrics", "values"))


def read_runs(folder: Path) -> list[Row]:
    """Return a row for each run below `folder`, newest first, and update the index there.

    A folder that cannot be written is no error: the next call then reads the runs again.
    """
    stored, written_ns = _stored(folder)
    now_ns = time.time_ns()
    found: dict[str, tuple[list[int], Row]] = {}
    for name, changed_ns in run_names(folder):
        stamp = [changed_ns, *_stamp(f"{folder}/{name}/{METRICS}"), *_stamp(f"{folder}/{name}/{STATUS}")]
        seen, row = stored.get(name, ([], None))
        is_recent = stamp != seen or max(stamp) >= written_ns - _CLOCK_NS  # no size is as large as a time
        if row is None or is_recent or row.state in _MAY_CHANGE:
            row = read_row(RunDir(folder / name), name)
        found[name] = stamp, row
    if found != stored or not stored:
        _write(folder, found, now_ns)
    return sorted((row for _, row in found.values()), key=lambda row: (row.began, row.run), reverse=True)


def _stamp(path: str) -> tuple[int, int]:
    """Return the modification time in ns and the size of a file; zeros where there is none to read."""
    try:
        found = os.stat(path)  # noqa: PTH116 - for 10,000 runs
    except OSError:
        return 0, 0  # read_row reports it
    return found.st_mtime_ns, found.st_size


def run_names(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the relative paths of the run directories below `folder` with their modification times in ns.

    Links to directories are followed, and what they lead to is found once. A directory below `folder` that
    may not be listed is left out, with a note.
    """
    pending, seen = deque([""]), set[tuple[int, int]]()
    while pending:
        name = pending.pop()
        try:
            found = os.stat(folder / name)  # noqa: PTH116 - for 10,000 runs
            if not stat.S_ISDIR(found.st_mode) or (found.st_dev, found.st_ino) in seen:
                continue
            seen.add((found.st_dev, found.st_ino))
            if is_run_name(name.rpartition("/")[2]):
                yield name, found.st_mtime_ns
                continue
            children = [*os.scandir(folder / name)]
        except FileNotFoundError:  # removed meanwhile, or a link that leads nowhere
            continue
        except OSError as error:
            if not name or error.errno not in _ELSEWHERE:
                raise
            note_unreadable(f"{folder / name}", str(error.strerror))
            continue
        for entry in children:
            path = f"{name}/{entry.name}".lstrip("/")
            if is_run_name(entry.name) or (path.count("/") < _DEPTH and not entry.name.startswith(".")):
                if entry.is_symlink() and (is_run_name(entry.name) or path.count("/") <= 1):
                    pending.appendleft(path)  # last, so that a run is called by its own place
                elif entry.is_dir(follow_symlinks=False):
                    pending.append(path)


def read_row(run: RunDir, name: str) -> Row:
    """Return the row of one run, whose directory is `name` below the folder of runs."""
    status, fault = status_of(run)
    parts, damaged = objects_of(run, "values", "plan", "data", "tags")
    damaged += [fault] if fault else []
    values, numbers = parts["values"], status.metrics
    wanted, is_done = values.get("BEST_METRIC"), status.state == "done"
    metric, best, best_step = _best(run.metrics, damaged, wanted, is_done=is_done)
    return Row(
        run=name,
        state=status.state,
        reason=status.reason,
        model=run.model,
        data=str(values.get("DATASET") or parts["data"].get("name") or ""),
        identity=run.identity,
        began=f"{datetime.fromtimestamp(run.began, UTC):%Y-%m-%d %H:%M:%S}",
        step=status.step,
        seconds=numbers.pop("seconds", None),
        effective_batch=parts["plan"].get("effective_batch"),
        metric=metric,
        best=best,
        best_step=best_step,
        metrics=numbers,
        tags=tuple(parts["tags"]),
        damaged=tuple(damaged),
        values=values,
    )


def status_of(run: RunDir) -> tuple[Status, str]:
    """Return the status, and the name of the file if one is missing or damaged.

    The state is "killed" where it would be "running" and no process holds the lock.
    """
    status, file = Status(state="unknown"), STATUS
    try:
        status = run.status()
        if status.state == "unknown":
            return status, file
        file = LOCK
        if status.state == "running" and not run.in_use:
            status = replace(status, state="killed")
    except ToolkitError:
        return status, file
    return status, ""


def objects_of(run: RunDir, *names: str) -> tuple[dict[str, Any], list[str]]:
    """Return OBJECTS and tags of a run by name, empty where one cannot be read, and the files of those."""
    parts, damaged = dict[str, Any](), list[str]()
    for name in names:
        try:
            parts[name] = run.tags() if name == "tags" else run.read_json(name)
        except ToolkitError:  # a run of an older version, or damaged: its row has what is left
            parts[name] = {}
            damaged.append(f"{name}.json")
    return parts, damaged


def stored(run: RunDir, name: str, read: Callable[[Mapping[str, Any]], T]) -> T:
    """Read `run`'s JSON file `name` through `read`; raises ToolkitError if it is malformed."""
    try:
        return read(run.read_json(name))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ToolkitError(
            f"the {name} of {run.path} cannot be read",
            why=f"it was written by another version, or changed ({error})",
            todo="start again with make train CONFIG_RESUME_NEVER=y",
        ) from error


def facts_of(content: Any, path: str = "", *, skip: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield every plain value or list in nested objects and lists, with its path in words."""
    if isinstance(content, Mapping):
        entries = [(str(key), value) for key, value in content.items() if key not in skip]
    elif isinstance(content, list | tuple) and any(isinstance(value, Mapping) for value in content):
        entries = [(str(index), value) for index, value in enumerate(content)]
    else:
        yield path, [*content] if isinstance(content, tuple) else content
        return
    for key, value in entries:
        yield from facts_of(value, f"{path} {key}".lstrip(), skip=skip)


def _best(
    metrics: Path, damaged: list[str], wanted: object, *, is_done: bool
) -> tuple[str, float | None, int | None]:
    """Return the wanted or else preferred metric of the evaluations in a file, its best value and its step.

    Lines that are no rows are left out. The first is added to `damaged`; so is a file that cannot be read.
    """
    rows, bad = list[dict[str, Any]](), list[str]()
    try:
        with metrics.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    bad += [f"{metrics.name}:{number}"] * is_done  # else it is still being written
                elif b'"eval"' not in line and line[:1] + line[-2:] == b"{}\n":
                    pass  # rows of training need not be parsed
                elif (row := parse_row(line)) is None:
                    bad.append(f"{metrics.name}:{number}")
                elif row.get("kind") == "eval" and "step" in row:
                    rows.append(row)
    except FileNotFoundError:
        pass  # nothing was logged yet
    except OSError:
        bad.append(metrics.name)
    damaged += bad[:1]
    metric = preferred({name for row in rows for name in row}, wanted)
    found = [(float(row[metric]), row["step"]) for row in rows if isinstance(row.get(metric), int | float)]
    if not found:
        return metric, None, None
    best, step = (max if higher_is_better(metric) else min)(found, key=operator.itemgetter(0))
    return metric, best, int(step)


def _stored(folder: Path) -> tuple[dict[str, tuple[list[int], Row]], int]:
    """Return the entries of the index and the time it was written; none where it is missing or unreadable."""
    try:
        content = json.loads((folder / INDEX).read_bytes())
        found = {}
        for name, entry in content["runs"].items() if content["version"] == _VERSION else ():
            row = entry["row"]
            row |= {"tags": tuple(row["tags"]), "damaged": tuple(row["damaged"])}
            row["values"] = {**content["bases"][row["model"]], **row["values"]}
            for gone in row.pop("without"):
                del row["values"][gone]
            found[name] = entry["stamp"], Row(**row)
        return found, content["written_ns"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, 0  # the index is a copy, and is made again


def _write(folder: Path, found: Mapping[str, tuple[list[int], Row]], now_ns: int) -> None:
    bases: dict[str, Mapping[str, Any]] = {}
    runs = dict[str, Any]()
    for name, (stamp, row) in found.items():
        base = bases.setdefault(row.model, row.values)
        own = {key: value for key, value in row.values.items() if key not in base or base[key] != value}
        gone = [key for key in base if key not in row.values]
        runs[name] = {"stamp": stamp, "row": {**row.to_json(), "values": own, "without": gone}}
    content = {"version": _VERSION, "written_ns": now_ns, "bases": bases, "runs": runs}
    # A folder of somebody else's, or none: see read_runs.
    with contextlib.suppress(OSError):
        atomic.write_text(folder / INDEX, json.dumps(content) + "\n")


def select(rows: Sequence[Row], where: str) -> list[Row]:
    """Return the rows that meet every condition of `where`: words such as model=resnet18 or lr>0.001.

    Text after = and != may hold the wildcards * and ?. A row without a value of the key meets only !=.
    Raises ConfigError for a word that is no condition and for a key that no run has.
    """
    kept = list(rows)
    for word in where.split():
        match = _CONDITION.fullmatch(word)
        if match is None:
            todo = "write KEY=VALUE, KEY>VALUE or the like, without spaces"
            raise ConfigError(f"WHERE: {word} is not a condition", todo=todo)
        key, sign, text = match.groups()
        check_key("WHERE", key, rows)
        known = [value for row in rows if (value := row.value(key)) is not None]
        is_number = known and all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
        if is_number and not _NUMBER_OR_PATTERN.fullmatch(text):
            raise ConfigError(f"WHERE: {word} compares a number with {text or 'nothing'}")
        kept = [row for row in kept if _holds(row.value(key), sign, text)]
    return kept


def _holds(value: Any, sign: str, text: str) -> bool:
    if sign == "!=":
        return value is None or not _holds(value, "=", text)
    if value is None:
        return False
    if isinstance(value, bool):
        value = "y" if value else "n"
    if isinstance(value, int | float):
        with contextlib.suppress(ValueError):
            return bool(_COMPARE[sign](value, float(text)))
    if sign == "=":
        words = value if isinstance(value, tuple | list) else [value]
        return any(fnmatch.fnmatchcase(str(word), text) for word in words)
    return isinstance(value, str) and bool(_COMPARE[sign](value, text))


def check_key(variable: str, key: str, rows: Sequence[Row]) -> None:
    """Raise ConfigError, with the nearest known keys, where no row has a value called `key`."""
    if rows and all(row.value(key) is None for row in rows) and key not in _FIELDS and key not in ALIASES:
        known = {*_FIELDS, *ALIASES, *(name.lower() for row in rows for name in (*row.metrics, *row.values))}
        todo = meant(key.lower(), sorted(known), listed="make runs LIMIT=1 JSON=1 shows what a run has")
        raise ConfigError(f"{variable}: no run has a value called {key}", todo=todo)


def sort(rows: Sequence[Row], key: str) -> list[Row]:
    """Return the rows with the best metric first, the largest number, or the first text; others last.

    A minus before the key reverses that. Raises ConfigError for a key that no run has.
    """
    name = key.removeprefix("-")
    check_key("SORT", name, rows)
    known = [row for row in rows if row.value(name) is not None]
    is_text = any(not isinstance(row.value(name), int | float) for row in known)

    def rank(row: Row) -> Any:
        value = row.value(name)
        if is_text:
            return str(value)
        return value if higher_is_better(row.metric if name == "best" else name) else -value

    known.sort(key=rank, reverse=is_text == key.startswith("-"))
    return [*known, *(row for row in rows if row.value(name) is None)]
