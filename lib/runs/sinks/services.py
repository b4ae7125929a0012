"""Sinks for Weights & Biases and trackio, which keep what they receive: each row is sent once."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ToolkitError, os_error
from lib.runs.directory import RunDir
from lib.runs.sinks.base import Row, scalars

_NONE = [-1, False]  # sorts before every row


class Service:
    """Sink that sends each row once, recording the last one in a file.

    The file is written before sending: a killed run may omit a row, but sends none twice. Steps measured
    again after a kill are not sent again.
    """

    def __init__(
        self, file: Path, *, log: Callable[[dict[str, float], int], Any], finish: Callable[[bool], Any]
    ) -> None:
        """file: records the last row. log: takes a row's numbers and step. finish: takes "done"."""
        self._file, self._log, self._finish = file, log, finish
        self._last = _read(file)

    def send(self, rows: Sequence[Row]) -> None:
        """Send new rows in order. Raises ToolkitError if the file cannot be written."""
        new = [row for row in rows if _place(row) > self._last]
        if not new:
            return
        self._last = _place(new[-1])
        try:
            atomic.write_text(self._file, json.dumps(self._last) + "\n")
        except OSError as error:
            raise os_error("write", error) from error
        for row in new:
            self._log(scalars(row), row["step"])

    def close(self, *, done: bool) -> None:
        """Finish the run at the service."""
        self._finish(done)


def open_wandb(run: RunDir, *, project: str) -> Service:
    """Open the run of that name at Weights & Biases. Raises ToolkitError if it cannot be used."""
    wandb = importlib.import_module("wandb")
    folder = _folder(run)
    try:
        logged = wandb.init(
            project=project,
            id=run.name,
            name=run.name,
            group=run.model,
            config=run.read_json("values"),
            dir=str(folder),
            resume="allow",
            settings=wandb.Settings(console="off"),  # the run logs its own output
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise ToolkitError(
            "Weights & Biases cannot be used",
            why=reason,
            todo="log in by wandb login, or set WANDB_MODE=offline",
        ) from error
    # wandb's default x axis, its own growing count of calls, would drop the last evaluation of a resumed run.
    logged.define_metric("step")
    logged.define_metric("*", step_metric="step")
    return Service(
        folder / "wandb.json",
        log=lambda values, step: logged.log({**values, "step": step}),
        finish=lambda done: logged.finish(exit_code=0 if done else 1),
    )


def open_trackio(run: RunDir, *, project: str) -> Service:
    """Open the run of that name in trackio, wherever trackio's own settings store it."""
    trackio = importlib.import_module("trackio")
    trackio.init(
        project=project, name=run.name, group=run.model, config=run.read_json("values"), resume="allow"
    )
    return Service(
        _folder(run) / "trackio.json",
        log=lambda values, step: trackio.log(values, step=step),
        finish=lambda _: trackio.finish(),
    )


OPENING = {"wandb": open_wandb, "trackio": open_trackio}


def _place(row: Row) -> list[Any]:
    """Sort key of a run's rows: at one step training comes before evaluation."""
    return [row["step"], row["kind"] == "eval"]


def _read(file: Path) -> list[Any]:
    try:
        step, evaluated = json.loads(file.read_bytes())
    except FileNotFoundError:
        return _NONE
    except (ValueError, TypeError) as error:
        raise ToolkitError(f"{file} is damaged", why=str(error), todo="remove it to send all rows") from error
    return [step, evaluated]


def _folder(run: RunDir) -> Path:
    try:
        run.sinks.mkdir(exist_ok=True)
    except OSError as error:
        raise os_error("create", error) from error
    return run.sinks
