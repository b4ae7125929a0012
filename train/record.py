"""What a run leaves behind: rank 0 writes files and talks, the other ranks are silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lib.errors import ToolkitError
from lib.plan.types import Plan
from lib.runs import checkpoint, metrics
from lib.runs.console import Console
from lib.runs.directory import RunDir
from lib.runs.metrics import MetricsWriter, Scalar
from lib.runs.sinks.base import Sink, Sinks
from lib.runs.storage import StorageError
from train.signals import StopRequest
from train.upload import Copier


class Record(Protocol):
    """Where the loop reports to."""

    def begin(self, step: int, total_steps: int | None) -> None:
        """Training starts after `step` steps: forget rows of later ones."""

    def say(self, text: str) -> None:
        """Tell the user something once."""

    def row(self, kind: str, **values: Scalar) -> None:
        """Keep a row of measurements: kind "train" or "eval"."""

    def progress(self, step: int, fraction: float) -> None:
        """Called after every step; must cost next to nothing."""

    def flush(self) -> None:
        """What was told so far is kept before a checkpoint is."""

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:
        """Keep a checkpoint of `step`. May be called on a thread of its own, one at a time."""

    def replan(self, plan: Plan, why: str) -> None:
        """The plan has changed in the middle of the run."""

    def finish(self, step: int, *, seconds: float, result: Mapping[str, float], part: str) -> None:
        """The run has come to its end: `result` is its last evaluation, on the part that `part` names."""


class SilentRecord:
    """The record of a rank that neither prints nor writes."""

    def begin(self, step: int, total_steps: int | None) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def row(self, kind: str, **values: Scalar) -> None:
        pass

    def progress(self, step: int, fraction: float) -> None:
        pass

    def flush(self) -> None:
        pass

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:
        pass

    def replan(self, plan: Plan, why: str) -> None:
        pass

    def finish(self, step: int, *, seconds: float, result: Mapping[str, float], part: str) -> None:
        pass


class RunRecord:
    """The record of rank 0: a run directory and the terminal."""

    def __init__(
        self,
        run: RunDir,
        console: Console,
        *,
        started: float,
        keep_last: int,
        open_sinks: Callable[[], Sequence[Sink]] = tuple,
        copier: Copier | None = None,
    ) -> None:
        """open_sinks: opens what is to be kept up with metrics.jsonl, when training begins.

        copier: brings each checkpoint to storage.
        """
        self.run, self.console = run, console
        self._started, self._keep_last = started, keep_last
        self._open_sinks, self._copier, self._done = open_sinks, copier, False
        self._metrics: MetricsWriter | None = None
        self._sinks: Sinks | None = None
        self._shown: dict[str, float] = {}  # of the last row, for the progress line
        self._rate = 0.0
        self._first_step: int | None = None

    def begin(self, step: int, total_steps: int | None) -> None:
        metrics.truncate_after(self.run.metrics, step)
        self._metrics = MetricsWriter(self.run.metrics)
        self._sinks = Sinks(self.run.metrics, self._open_sinks())
        self._sinks.catch_up()
        self.console.start(total_steps, description=self.run.model)

    def say(self, text: str) -> None:
        self.console.say(text)

    def row(self, kind: str, **values: Scalar) -> None:
        assert self._metrics is not None, "begin comes first"
        self._metrics.write({"kind": kind, **values})
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if kind == "train":
            self._shown = {name: numbers[name] for name in ("loss", "accuracy") if name in numbers}
            self._rate = numbers["samples_per_second"]
            return
        self.flush()
        self.say(f"step {numbers['step']:.0f}, epoch {numbers['epoch']:.2f}: {told(numbers)}")

    def progress(self, step: int, fraction: float) -> None:
        if self._first_step is None:
            self._first_step = step
            self.say(f"First optimizer step {time.monotonic() - self._started:.1f} s after the start")
        self._tell_copies()
        self.console.update(step, values=self._shown, fraction=fraction, samples_per_second=self._rate)

    def flush(self) -> None:
        assert self._metrics is not None and self._sinks is not None, "begin comes first"
        self._metrics.flush()
        self._sinks.catch_up()

    def save(self, step: int, state: Mapping[str, Any], *, best: bool) -> None:
        if not self.run.config.is_file():
            raise ToolkitError(f"{self.run.path} is gone", why="it was removed while this run trained in it")
        checkpoint.save(self.run.checkpoints, step=step, state=state, keep_last=self._keep_last, best=best)
        self.run.set_status("running", step=step)
        if self._copier is not None:
            self._copier.begin()

    def replan(self, plan: Plan, why: str) -> None:
        self.say(why)
        self.run.write("plan", plan.to_json())

    def finish(self, step: int, *, seconds: float, result: Mapping[str, float], part: str) -> None:
        facts: dict[str, Any] = {"seconds": seconds, "part": part, **result}
        self.run.set_status("done", step=step, **facts)  # first: nothing may come between saying and being so
        self._done = True
        self.console.stop()
        self.say(f"Done: {told(result)} ({part}), {seconds:.1f} s of training")
        if self._copier is not None:
            with StopRequest():  # the first signal does not cut it off
                failure = self._last_copy(self._copier)
            if failure:
                raise StorageError(
                    f"the newest checkpoint is not in {self._copier.url}",
                    why=failure,
                    todo=f"the run is done, and whole in {self.run.path}: copy it by hand",
                )
            self.say(f"Copied to {self._copier.url}")
        self.say(f"Run: {self.run.path}")

    def broken_off(self) -> None:
        """The run ends before its time, and its directory says how: wait until storage has that, too."""
        if self._copier is None or self._done or not self.run.config.is_file():
            return
        if failure := self._last_copy(self._copier):
            self.say(f"The newest checkpoint is not in {self._copier.url}: {failure}")

    def _last_copy(self, copier: Copier) -> str:
        """Copy how the run is now, and wait; returns why that could not be done."""
        copier.begin()
        failure = copier.wait(self.say)
        if not failure:  # which is told by who asked
            self._tell_copies()
        return failure

    def _tell_copies(self) -> None:
        if self._copier is not None:
            for line in self._copier.news():
                self.say(line)

    def close(self) -> None:
        self.console.stop()
        try:
            if self._metrics is not None:
                self._metrics.close()
        finally:
            if self._sinks is not None:
                self._sinks.close(done=self._done)


def told(result: Mapping[str, float]) -> str:
    """An evaluation in words, without the step it was made at. What it counts comes first (`Task.report`)."""
    numbers = {name: value for name, value in result.items() if name not in ("step", "epoch")}
    unit, *names = numbers
    one = unit.removesuffix("s")
    # Figures of a language model mean little without what they are per.
    per = {} if one == "sample" else {"loss": f" nats per {one}", "perplexity": f" per {one}"}
    means = [f"{name.replace('_', ' ')} {numbers[name]:.4f}{per.get(name, '')}" for name in names]
    return f"{', '.join(means)} over {numbers[unit]:.0f} {unit}"
