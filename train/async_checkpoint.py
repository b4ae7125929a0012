"""Synchronous and asynchronous checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from lib.distributed.fsdp import Gatherer, put_together, snapshot
from train.record import Record
from train.signals import Stopped


class Saver:
    """Checkpoint writer of a job. Used on every rank, because each may hold a shard of the state.

    aside: asynchronous: a state is copied to host memory, and a thread gathers the copies of all ranks and
    saves them. One at a time: the next save waits for it, and so does the end of the `with` statement.
    """

    def __init__(self, record: Record, *, aside: bool) -> None:
        self._record = record
        self._writer = ThreadPoolExecutor(1, "checkpoint") if aside else None
        self._under_way: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        under_way, self._under_way = self._under_way, None
        try:
            failure = under_way.exception() if under_way is not None else None  # waits for its end
        finally:  # also if a signal interrupts the wait
            if self._writer is not None:
                self._writer.shutdown()
        if failure is None:
            return
        if error is None or isinstance(error, Stopped):
            raise failure
        self._record.say(f"The last checkpoint was not kept: {failure}")  # the other error ends the run

    def save(self, step: int, parts: Mapping[str, Any], gatherer: Gatherer, *, best: bool) -> None:
        """Save the state after `step` steps; `parts` is this rank's share (`fsdp.in_parts`).

        Raises errors of saving; with `aside`, those of the previous save.
        """
        self._record.flush()  # so that metrics up to the checkpoint survive a crash
        if self._writer is None:
            self._keep(step, parts, gatherer, best)
            return
        self._wait()
        taken = snapshot(parts, whole=gatherer.rank == 0)
        self._under_way = self._writer.submit(self._keep, step, taken, gatherer, best)

    def check(self) -> None:
        """Raise the error of the last asynchronous save, if it has ended with one."""
        if self._under_way is not None and self._under_way.done():
            self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _keep(self, step: int, parts: Mapping[str, Any], gatherer: Gatherer, best: bool) -> None:
        self._record.save(step, put_together(parts, gatherer), best=best)
