"""When a checkpoint is written: while training waits for it, or beside training that goes on."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from lib.distributed.fsdp import Gatherer, put_together, snapshot
from train.record import Record
from train.signals import Stopped


class Saver:
    """Has a record keep states of a job. On every rank, for each may have a part of them.

    aside: a state is copied to main memory, and a thread of its own puts the copies of all ranks together and
    has them kept. One at a time: the next one waits for it, and so does the end of the `with` statement.
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
        finally:  # also where a signal ends that
            if self._writer is not None:
                self._writer.shutdown()
        if failure is None:
            return
        if error is None or isinstance(error, Stopped):
            raise failure
        self._record.say(f"The last checkpoint was not kept: {failure}")  # the other error ends the run

    def save(self, step: int, parts: Mapping[str, Any], gatherer: Gatherer, *, best: bool) -> None:
        """Keep the state after `step` steps, of which this rank has `parts` (`fsdp.in_parts`).

        Raises what goes wrong; with `aside` what has gone wrong with the one before.
        """
        self._record.flush()  # so that rows up to the checkpoint are there if the run dies now
        if self._writer is None:
            self._keep(step, parts, gatherer, best)
            return
        self._wait()
        taken = snapshot(parts, whole=gatherer.rank == 0)
        self._under_way = self._writer.submit(self._keep, step, taken, gatherer, best)

    def check(self) -> None:
        """Raises what went wrong with a checkpoint that is no longer being written."""
        if self._under_way is not None and self._under_way.done():
            self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _keep(self, step: int, parts: Mapping[str, Any], gatherer: Gatherer, best: bool) -> None:
        self._record.save(step, put_together(parts, gatherer), best=best)
