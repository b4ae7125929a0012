"""Where the rows of metrics.jsonl go besides: event files of TensorBoard, Weights & Biases, trackio.

metrics.jsonl comes first and is what counts. A sink is given what has been written there, so that a run
that goes on, whose later rows were cut off, tells no step twice.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from lib.config import Config
from lib.errors import ConfigError
from lib.runs.directory import RunDir
from lib.runs.metrics import Follower

Row: TypeAlias = Mapping[str, Any]


class Sink(Protocol):
    def send(self, rows: Sequence[Row]) -> None:
        """Take the rows that follow those of the last call; the first ones are those of earlier starts."""

    def close(self, *, done: bool) -> None:
        """Nothing comes any more. done: the run has come to its end."""


class Sinks:
    """Sinks that are kept up with a file of rows, which is there."""

    def __init__(self, path: Path, sinks: Sequence[Sink]) -> None:
        self._path, self._follower, self._sinks = path, Follower(path), sinks

    def catch_up(self) -> None:
        """Give every sink what has been written since the last time; at first, what is there from earlier."""
        if not self._sinks:
            return
        for rows in self._follower.batches():
            for sink in self._sinks:
                sink.send(rows)

    def close(self, *, done: bool) -> None:
        """Close every sink, even where one of them fails. done: the run has come to its end.

        A run whose directory was removed has an error of its own to tell.
        """
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close, done=done)
            if self._path.exists():
                self.catch_up()


def check_packages(config: Config) -> None:
    """Raises ConfigError where a sink was chosen whose package is not installed."""
    for name in _services(config):
        found = importlib.util.find_spec(name)
        # A directory of that name, such as the one that wandb writes, can be imported, but is no package.
        if found is None or found.origin is None:
            raise ConfigError(
                f"the package {name} is not installed",
                why=f"CONFIG_SINK_{name.upper()}=y needs it",
                todo=f"install the extra {name}, for example with .venv/bin/pip install {name}",
            )


def open_sinks(config: Config, run: RunDir) -> list[Sink]:
    """The sinks that were chosen; what they keep is in a directory of the run. None is imported before.

    Raises ToolkitError where one of them cannot be used.
    """
    sinks: list[Sink] = []
    if chosen := _services(config):
        from lib.runs.sinks.services import OPENING

        sinks += [OPENING[name](run, project=project) for name, project in chosen.items()]
    if config.sink_tensorboard:
        from lib.runs.sinks.tensorboard import EventFile

        sinks.append(EventFile(run.sinks, began=run.began))
    return sinks


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row but its step, by names such as train/loss."""
    return {
        f"{row['kind']}/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    }


def _services(config: Config) -> dict[str, str]:
    """Chosen sinks that are packages of others, by name, with the project that they file the run under."""
    chosen = {"wandb": config.sink_wandb, "trackio": config.sink_trackio}
    if not any(chosen.values()):
        return {}
    assert config.sink_project is not None
    return {name: config.sink_project for name, wanted in chosen.items() if wanted}
