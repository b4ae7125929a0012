"""Synchronous and asynchronous checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from lib.distributed.fsdp import Gatherer, gather_full, snapshot
from train.record import Record
from train.signals import Stopped


class AsyncCheckpointer:
    """Checkpoint writer of a job. Used on every rank, because each may hold a shard of the state.

    asynchronous: a state is copied to host memory, and a thread gathers the copies of all ranks and
    saves them. One at a time: the next save waits for it, and so does the end of the `with` statement.
    """

    def __init__(self, record: Record, *, asynchronous: bool) -> None:
        self._record = record
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
        self._record.save(step, gather_full(parts, gatherer), best=best)
