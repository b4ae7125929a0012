"""Sinks: rows of metrics.jsonl passed on to TensorBoard, Weights & Biases and trackio during a run.

metrics.jsonl is written first and is authoritative. Sinks read from it, so that a resumed run, whose later
rows were dropped, reports no step twice. The packages of sinks are optional extras, imported when used.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lib import atomic
from lib.config import Config
from lib.errors import ConfigError, ToolkitError, os_errors
from lib.runs.directory import EVENTS, RunDir
from lib.runs.metrics import KINDS, Follower

Row: TypeAlias = Mapping[str, Any]

_NONE = [-1, False]  # sorts before every row


class Sink(Protocol):
    """Interface of a consumer of metric rows."""

    def send(self, rows: Sequence[Row]) -> None:
        """Take the rows that follow those of the last call, beginning with those of earlier starts."""

    def close(self, *, done: bool) -> None:
        """Close the sink. done: the run has finished."""


class Sinks:
    """The open sinks of one run, fed from its metrics file, which must exist."""

    def __init__(self, path: Path, sinks: Sequence[Sink]) -> None:
        self._path, self._follower, self._sinks = path, Follower(path), sinks

    def catch_up(self) -> None:
        """Send every sink the rows written since the last call; the first call sends all existing rows."""
        for rows in self._follower.batches() if self._sinks else ():
            for sink in self._sinks:
                sink.send(rows)

    def close(self, *, done: bool) -> None:
        """Close every sink, even if one of them fails. done: the run has finished."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close, done=done)
            if self._path.exists():  # a run whose directory was removed has an error of its own
                self.catch_up()


def check_packages(config: Config) -> None:
    """Check the packages of the selected sinks. Raises ConfigError if one is not installed."""
    for name in _selected(config):
        found = importlib.util.find_spec(name)
        # A plain directory of that name, such as the one that wandb writes, is importable but is no package.
        if found is None or found.origin is None:
            raise ConfigError(
                f"the package {name} is not installed",
                why=f"CONFIG_SINK_{name.upper()}=y needs it",
                todo=f"install the extra {name}, for example with .venv/bin/pip install {name}",
            )


def open_sinks(config: Config, run: RunDir) -> list[Sink]:
    """Open the selected sinks, with files in the run directory. Raises ToolkitError if one cannot be used."""
    selected = _selected(config)
    if selected:
        with os_errors("create"):
            run.sinks.mkdir(parents=True, exist_ok=True)
    return [_OPEN[name](run, config.sinks.sink_project) for name in selected]


def _selected(config: Config) -> list[str]:
    """Return the selected sinks by the names of their packages."""
    sinks = config.sinks
    chosen = {"wandb": sinks.sink_wandb, "trackio": sinks.sink_trackio, "tensorboard": sinks.sink_tensorboard}
    return [name for name, wanted in chosen.items() if wanted]


def _scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row except its step, under names such as train/loss."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    return {f"{row['kind']}/{name}": float(value) for name, value in numbers.items() if name != "step"}


class EventFile:
    """Sink that writes the rows of a run to one TensorBoard event file, new each time the run starts.

    The file begins with a session start at step 0, at which a TensorBoard that has read an earlier file drops
    what it has. TensorBoard moves to the new file only from one that still exists: the last of the earlier
    files is emptied, the others are removed. Not torch's SummaryWriter, which names files by the clock.
    """

    def __init__(self, folder: Path, *, began: float) -> None:
        """began: seconds since the epoch. A row's wall time is this plus its seconds of training.

        Raises ToolkitError if the file cannot be written.
        """
        self._seconds = self._began = began
        event_pb2 = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary_pb2 = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        with os_errors("write"):
            self._earlier = sorted(folder.glob(f"{EVENTS}*"))
            number = 1 + max((int(path.suffix[1:]) for path in self._earlier), default=0)
            self._file = (folder / f"{EVENTS}{number:06d}").open("xb")
        self._records = writer.RecordWriter(self._file)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write([{"file_version": "brain.Event:2"}, {"session_log": start}])

    def send(self, rows: Sequence[Row]) -> None:
        """Append rows as events. Raises ToolkitError if the file cannot be written."""
        for row in rows:
            if "seconds" in row:
                self._seconds = self._began + row["seconds"]
            values = [{"tag": tag, "simple_value": value} for tag, value in _scalars(row).items()]
            self._write([{"step": row["step"], "summary": self._summary(value=values)}])
        with os_errors("remove"):
            for path in self._earlier[-1:]:
                os.truncate(path, 0)
            for path in self._earlier[:-1]:
                path.unlink()
        self._earlier.clear()

    def close(self, *, done: bool) -> None:  # noqa: ARG002
        """Close the file."""
        self._file.close()

    def _write(self, events: Sequence[Mapping[str, Any]]) -> None:
        with os_errors("write", todo="free some space"), atomic.naming(Path(self._file.name)):
            for fields in events:
                self._records.write(self._event(wall_time=self._seconds, **fields).SerializeToString())
            self._records.flush()


class Service:
    """Sink for a package that keeps what it receives: sends each row once, recording the last one in a file.

    The file is written before sending: a killed run may omit a row, but sends none twice. Steps measured
    again after a kill are not sent again.
    """

    def __init__(
        self, file: Path, *, log: Callable[[dict[str, float], int], Any], finish: Callable[[bool], Any]
    ) -> None:
        """file: records the last row. log: takes a row's numbers and step. finish: takes "done"."""
        self._file, self._log, self._finish = file, log, finish
        self._last = _last_sent(file)

    def send(self, rows: Sequence[Row]) -> None:
        """Send new rows in order. Raises ToolkitError if the file cannot be written."""
        new = [row for row in rows if _sort_key(row) > self._last]
        if new:
            self._last = _sort_key(new[-1])
            with os_errors("write"):
                atomic.write_text(self._file, json.dumps(self._last) + "\n")
        for row in new:
            self._log(_scalars(row), row["step"])

    def close(self, *, done: bool) -> None:
        """Finish the run at the service."""
        self._finish(done)


def _sort_key(row: Row) -> list[Any]:
    """Return the sort key of a row: at one step training comes first, then evaluation, then speed."""
    return [row["step"], KINDS.index(row["kind"])]


def _last_sent(file: Path) -> list[Any]:
    try:
        step, evaluated = json.loads(file.read_bytes())
    except FileNotFoundError:
        return _NONE
    except (ValueError, TypeError) as error:
        raise ToolkitError(f"{file} is damaged", why=str(error), todo="remove it to send all rows") from error
    return [step, evaluated]


def _open_wandb(run: RunDir, project: str | None) -> Service:
    """Open the run of that name at Weights & Biases. Raises ToolkitError if it cannot be used."""
    wandb = importlib.import_module("wandb")
    try:
        logged = wandb.init(
            project=project,
            id=run.name,
            name=run.name,
            group=run.model,
            config=run.read_json("values"),
            dir=str(run.sinks),
            resume="allow",
            settings=wandb.Settings(console="off"),  # the run logs its own output
        )
    except wandb.Error as error:
        raise ToolkitError(
            "Weights & Biases cannot be used",
            why=" ".join(str(error).split()),
            todo="log in by wandb login, or set WANDB_MODE=offline",
        ) from error
    # wandb's default x axis, its own growing count of calls, would drop the last evaluation of a resumed run.
    logged.define_metric("step")
    logged.define_metric("*", step_metric="step")
    return Service(
        run.sinks / "wandb.json",
        log=lambda values, step: logged.log({**values, "step": step}),
        finish=lambda done: logged.finish(exit_code=0 if done else 1),
    )


def _open_trackio(run: RunDir, project: str | None) -> Service:
    """Open the run of that name in trackio, wherever trackio's own settings store it."""
    trackio = importlib.import_module("trackio")
    values = run.read_json("values")
    trackio.init(project=project, name=run.name, group=run.model, config=values, resume="allow")
    return Service(
        run.sinks / "trackio.json",
        log=lambda values, step: trackio.log(values, step=step),
        finish=lambda _: trackio.finish(),
    )


_OPEN: Mapping[str, Callable[[RunDir, str | None], Sink]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "tensorboard": lambda run, _: EventFile(run.sinks, began=run.began),
}
