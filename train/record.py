"""Records of a run: rank 0 writes files and prints, the other ranks do neither."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from lib.distributed.fsdp import Gatherer, gather_full, snapshot, split_shards
from lib.errors import ToolkitError
from lib.plan.types import Plan
from lib.runs import checkpoint, metrics
from lib.runs.checkpoint import Writer
from lib.runs.console import Console
from lib.runs.directory import RunDir
from lib.runs.metrics import SHARES, MetricsWriter, Scalar
from train.signals import Stopped, StopRequest

if TYPE_CHECKING:
    from lib.runs.sinks import Sink, Sinks
    from train.upload import Copier

Result: TypeAlias = Mapping[str, float]
Reports: TypeAlias = Sequence[Callable[[], None]]
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_FAULTS = (*_OF_CODE, OSError, ToolkitError)

SHARDED = ("model", "optimizer", "ema")  # what a sharded checkpoint has shards of; rank 0 has the rest
_FLUSH_SECONDS = 10.0  # at most so old are the rows of a running run that others can read


class Record:
    """Interface through which the training loop reports. The base class, for ranks but 0, does nothing."""

    def begin(self, step: int, total_steps: int | None) -> None:
        """Start at `step`: drop rows of later steps."""

    # Called before the first step of a run that resumes, with whether a checkpoint was loaded.
    at_resume: Callable[[bool], object] = staticmethod(lambda _: None)

    def log(self, text: str) -> None:
        """Print a message to the user."""

    def row(self, kind: str, **values: Scalar) -> None:
        """Record a row of measurements: kind "train" or "eval"."""

    def progress(self, step: int, fraction: float) -> None:
        """Report progress. Called after every step, so it must be cheap."""

    def evaluating(self, step: int, done: int, total: int) -> None:
        """Report that `done` of `total` samples are evaluated after `step` steps; as cheap as `progress`."""

    def flush(self) -> None:
        """Write out all rows; called before a checkpoint is saved."""

    def save(
        self, step: int, state: Mapping[str, Any], *, best: bool, write_shards: Writer | None = None
    ) -> None:
        """Save a checkpoint of `step`. May be called on a thread of its own, one at a time.

        write_shards: of a sharded checkpoint (`checkpoint.save`).
        """

    def replan(self, plan: Plan, why: str) -> None:
        """Record that the plan has changed during the run."""

    def speed(self) -> Mapping[str, float]:
        """Return medians of the last training rows, and the seconds of the first step; empty for none."""
        return {}

    def finish(
        self,
        step: int,  # noqa: ARG002
        *,
        seconds: float,  # noqa: ARG002
        result: Result,  # noqa: ARG002
        part: str,  # noqa: ARG002
        reason: str = "",  # noqa: ARG002
        reports: Reports = (),
    ) -> None:
        """Finish with the last evaluation, on `part`, then make `reports`; one that fails is only logged.

        reason: why the run ended before its budget was spent; "" if it was.
        """
        for report in reports:
            try:
                report()
            except _FAULTS as error:  # the run is done
                self.log(f"A part of the summary is missing: {type(error).__name__}: {error}")


class RunRecord(Record):
    """Record of rank 0: a run directory and the terminal."""

    def __init__(
        self,
        run: RunDir,
        console: Console,
        *,
        started: float,
        keep_last: int,
        open_sinks: Callable[[], Sequence[Sink]] = tuple,
        copier: Copier | None = None,
        utilization: Callable[[], float | None] = lambda: None,
        peak_memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        """open_sinks: opens the sinks of metrics.jsonl, when training begins.

        copier: copies each checkpoint to storage. utilization: that of the device (`Backend.utilization`).
        peak_memory: in bytes (`training_peak`); None where it is not measured.
        """
        self.run, self.console = run, console
        self._started, self._keep_last = started, keep_last
        self._open_sinks, self._copier, self._done = open_sinks, copier, False
        self._metrics: MetricsWriter | None = None
        self._sinks: Sinks | None = None
        self._shown: dict[str, float] = {}  # of the last row, for the progress line
        self._rate = 0.0
        self._first_step: int | None = None
        self._utilization, self._peak_memory, self._first_step_seconds = utilization, peak_memory, 0.0

    def begin(self, step: int, total_steps: int | None) -> None:
        """Drop rows of later steps, and open metrics, sinks and the progress line."""
        metrics.truncate_after(self.run.metrics, step)
        self._metrics = MetricsWriter(self.run.metrics)
        self._next_flush = time.monotonic() + _FLUSH_SECONDS
        if sinks := self._open_sinks():
            from lib.runs.sinks import Sinks  # most runs have none

            self._sinks = Sinks(self.run.metrics, sinks)
            self._sinks.catch_up()
        self.console.start(total_steps, description=self.run.model)
        self._began = time.monotonic()

    def log(self, text: str) -> None:
        """Print and log a message."""
        self.console.log(text)

    def row(self, kind: str, **values: Scalar) -> None:
        """Write a row; one that is not of training is also flushed, and an evaluation printed."""
        assert self._metrics is not None, "begin comes first"
        if kind == "train":
            values |= self._device_columns()
        self._metrics.write({"kind": kind, **values})
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if kind == "train":
            if time.monotonic() >= self._next_flush:
                self._flush_metrics()
            self._shown = {name: numbers[name] for name in ("loss", "accuracy") if name in numbers}
            self._rate = numbers["samples_per_second"]
            return
        self.flush()
        if kind == "eval":
            where = f"step {numbers['step']:.0f}, epoch {numbers['epoch']:.2f}"
            self.log(f"{where}: {format_evaluation(numbers)}")

    def _device_columns(self) -> dict[str, float]:
        """Return the device's utilization and peak memory where they are measured; log once why not."""
        try:
            found = self._utilization()
        except ToolkitError as error:
            self.log(f"metrics.jsonl has no column device_utilization: {error}")
            self._utilization, found = lambda: None, None
        columns = {"device_utilization": found, metrics.PEAK: self._peak_memory()}
        return {name: value for name, value in columns.items() if value is not None}

    def speed(self) -> Mapping[str, float]:
        """Return medians of the last training rows but the first, and seconds of first step and compiler."""
        self._flush_metrics()
        rows = [row for row in metrics.tail(self.run.metrics) if row["kind"] == "train"]
        columns = [name for name in ("samples_per_second", *SHARES) if rows and name in rows[-1]]
        # Rows from before a resume on other devices lack some.
        medians = {
            name: statistics.median(row[name] for row in rows[1:] or rows if name in row) for name in columns
        }
        total = {name: rows[-1][name] for name in ("compile_seconds",) if rows and name in rows[-1]}
        return {**medians, "first_step_seconds": self._first_step_seconds, **total} if medians else {}

    def progress(self, step: int, fraction: float) -> None:
        """Update the progress line, and print news of copies to storage."""
        if self._first_step is None:
            self._first_step = step
            self._first_step_seconds = time.monotonic() - self._began
            self.log(f"First optimizer step {time.monotonic() - self._started:.1f} s after the start")
        self._log_copies()
        self.console.update(step, values=self._shown, fraction=fraction, samples_per_second=self._rate)

    def evaluating(self, step: int, done: int, total: int) -> None:
        """Update the progress line."""
        self.console.evaluate(step, done, total)

    def flush(self) -> None:
        """Write out all rows, and send them to the sinks."""
        self._flush_metrics()
        if self._sinks is not None:
            self._sinks.catch_up()

    def _flush_metrics(self) -> None:
        assert self._metrics is not None, "begin comes first"
        self._metrics.flush()
        self._next_flush = time.monotonic() + _FLUSH_SECONDS

    def save(
        self, step: int, state: Mapping[str, Any], *, best: bool, write_shards: Writer | None = None
    ) -> None:
        """Save a checkpoint and begin its copy to storage. Raises ToolkitError if the run was removed."""
        if not self.run.config.is_file():
            raise ToolkitError(f"{self.run.path} is gone", why="it was removed while this run trained in it")
        how: Any = {"keep_last": self._keep_last, "best": best, "write_shards": write_shards}
        checkpoint.save(self.run.checkpoints, step=step, state=state, **how)
        self.run.set_status("running", step=step)
        if self._copier is not None:
            self._copier.begin()

    def replan(self, plan: Plan, why: str) -> None:
        """Print the reason and store the plan."""
        self.log(why)
        self.run.write("plan", plan.to_json())

    def finish(
        self,
        step: int,
        *,
        seconds: float,
        result: Result,
        part: str,
        reason: str = "",
        reports: Reports = (),
    ) -> None:
        """Set the status to "done", print the result, and wait for the last copy, or raise StorageError."""
        facts: dict[str, Any] = {"seconds": seconds, "part": part, **result}
        self.run.set_status("done", step=step, reason=reason, **facts)  # first, before "Done" is printed
        self._done = True
        self.console.stop()
        super().finish(step, seconds=seconds, result=result, part=part, reports=reports)
        early = f"; {reason}" if reason else ""
        self.log(f"Done: {format_evaluation(result)} ({part}), {seconds:.1f} s of training{early}")
        if self._copier is not None:
            with StopRequest():  # the first signal does not interrupt it
                failure = self._last_copy(self._copier)
            if failure:
                from lib.runs.storage import StorageError

                raise StorageError(
                    f"the newest checkpoint is not in {self._copier.url}",
                    why=failure,
                    todo=f"the run is done, and whole in {self.run.path}: copy it by hand",
                )
            self.log(f"Copied to {self._copier.url}")
        self.log(f"Run: {self.run.path}")

    def copy_final_status(self) -> None:
        """Wait until storage has the final status of a run that ended early."""
        if self._copier is None or self._done or not self.run.config.is_file():
            return
        if failure := self._last_copy(self._copier):
            self.log(f"The newest checkpoint is not in {self._copier.url}: {failure}")

    def _last_copy(self, copier: Copier) -> str:
        """Copy the run's current state and wait; return why that failed, or ""."""
        copier.begin()
        failure = copier.wait(self.log)
        if not failure:  # the caller reports it
            self._log_copies()
        return failure

    def _log_copies(self) -> None:
        if self._copier is not None:
            for line in self._copier.news():
                self.log(line)

    def close(self) -> None:
        """End the progress line, and close metrics and sinks."""
        self.console.stop()
        try:
            if self._metrics is not None:
                self._metrics.close()
        finally:
            if self._sinks is not None:
                self._sinks.close(done=self._done)


class AsyncCheckpointer:
    """Checkpoint writer of a job. Used on every rank, because each may hold a shard of the state.

    asynchronous: a state is copied to host memory, and a thread gathers the copies of all ranks and
    saves them. One at a time: the next save waits for it, and so does the end of the `with` statement.
    sharded: the run's directory of checkpoints, where every rank writes its shard; None: rank 0 writes all.
    """

    def __init__(self, record: Record, *, asynchronous: bool, sharded: Path | None = None) -> None:
        self._record, self._sharded = record, sharded
        self._writer = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        pending, self._pending = self._pending, None
        try:
            failure = pending.exception() if pending is not None else None  # waits for its end
        finally:  # also if a signal interrupts the wait
            if self._writer is not None:
                self._writer.shutdown()
        if failure is None:
            return
        if error is None or isinstance(error, Stopped):
            raise failure
        self._record.log(f"The last checkpoint was not kept: {failure}")  # the other error ends the run

    def save(self, step: int, parts: Mapping[str, Any], gatherer: Gatherer, *, best: bool) -> None:
        """Save the state after `step` steps; `parts` is this rank's shard (`fsdp.to_local`).

        Raises errors of saving; if asynchronous, those of the previous save.
        """
        self._record.flush()  # so that metrics up to the checkpoint survive a crash
        if self._writer is None:
            self._write(step, parts, gatherer, best)
            return
        self._wait()
        copy = snapshot(parts, replicated=gatherer.rank == 0)
        self._pending = self._writer.submit(self._write, step, copy, gatherer, best)

    def check(self) -> None:
        """Raise the error of the last asynchronous save, if it has ended with one."""
        if self._pending is not None and self._pending.done():
            self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, parts: Mapping[str, Any], gatherer: Gatherer, best: bool) -> None:
        if self._sharded is None:
            self._record.save(step, gather_full(parts, gatherer), best=best)
        elif gatherer.rank < gatherer.ranks:
            from lib.runs import dcp  # most runs do without it

            state, shards = dict(parts), dict[str, dcp.Shard]()
            for name in SHARDED:
                state[name] = split_shards(parts[name], gatherer, name=name, shards=shards)
            write = partial(dcp.write, shards, group=gatherer.group, rank=gatherer.rank)
            if gatherer.rank == 0:
                self._record.save(step, state, best=best, write_shards=write)
            else:
                write(checkpoint.staging(self._sharded, step))


def format_evaluation(result: Mapping[str, float]) -> str:
    """Format an evaluation without its step; what it counts comes first (`Task.report`)."""
    numbers = {name: value for name, value in result.items() if name not in ("step", "epoch")}
    conversations = numbers.pop("conversations", 0)
    unit, *names = numbers
    one = unit.removesuffix("s")
    # Figures of a language model need the unit they are per.
    per = {} if one == "sample" else {"loss": f" nats per {one}", "perplexity": f" per {one}"}
    means = [f"{name.replace('_', ' ')} {numbers[name]:.4f}{per.get(name, '')}" for name in names]
    whole = f" of {conversations:.0f} conversations" if conversations else ""
    return f"{', '.join(means)} over {numbers[unit]:.0f} {unit}{whole}"


def log(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)
