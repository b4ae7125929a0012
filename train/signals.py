"""SIGINT and SIGTERM as requests to stop, which the training loop obeys at the end of a step on all ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from lib.distributed.launcher import restarts_by_itself
from lib.errors import CompileError, Suspended

if TYPE_CHECKING:
    from lib.devices.base import Backend
    from lib.runs.directory import Status

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def importing() -> Iterator[None]:
    """Import torch and numpy within: SIGINT kills the process at once, and garbage collection is off.

    numpy's bindings to torch swallow exceptions raised while they load, and the program would continue
    with half a library. Modules are never freed, so what exists by the end is excluded from collection
    for good: scanning it again and again takes a sixth of the time of importing torch.
    """
    collecting, interrupt = gc.isenabled(), signal.getsignal(signal.SIGINT)
    gc.disable()
    if interrupt is signal.default_int_handler:  # neither ignored nor handled by somebody else
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()
        if collecting:
            gc.enable()


class StopRequest:
    """Signal handler: the first signal is only remembered; a SIGINT after it ends the program at once.

    A SIGTERM after it is ignored: schedulers send it to every process of a job, to some twice, and
    send SIGKILL to those that do not end.

    A compiler has processes of its own, which a signal of the terminal ends, too: its error is then no fault,
    and is raised as Stopped.

    announce: print to standard error that the first signal was received, because a step may be long.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._announce = announce
        self.signal = 0  # number of the signal received, 0 = none
        self.saved_step = 0  # from which the run would resume
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self.signal and isinstance(error, CompileError):
            raise Stopped(self.signal, self.saved_step) from error

    def _remember(self, number: int, _frame: types.FrameType | None) -> None:
        if self.signal:
            return
        self.signal = number
        if self._announce:  # a stream may be in the middle of a write, a file descriptor cannot
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-C again ends at once\n")
        signal.signal(signal.SIGINT, self._previous.pop(signal.SIGINT))


class Agreement:
    """Maxima over ranks of stop signals and clocks: clocks differ, so decisions by time use these alone.

    On one process they are current. Several do not wait for them in each step: they use those that were sent
    in the step before, so all stop after the same step.
    """

    def __init__(self, backend: Backend, stop: StopRequest, *, seconds: float) -> None:
        """seconds: of training so far."""
        self._backend, self._stop, self.seconds = backend, stop, seconds
        self.signal, self.unsaved, self.unlogged = 0.0, 0.0, 0.0  # seconds without a checkpoint and a row
        self._saved_at = self._logged_at = time.monotonic()
        self._mark = time.perf_counter()  # when `seconds` was right
        self._sent: tuple[Callable[[], list[float]], float] | None = None

    def take(self) -> float:
        """Take what is agreed on after a step; return the seconds of training."""
        if self._sent is not None:
            self._receive()
        elif self._backend.world == 1:
            self._send()
            self._receive()
        return self.seconds

    def settle(self) -> float:
        """Wait for what the ranks agree on now, after a row of metrics was read; return the seconds."""
        self._send()
        self._receive()
        self._logged_at, self.unlogged = time.monotonic(), 0.0
        return self.seconds

    def saved(self) -> None:
        """Note that a checkpoint was saved."""
        self._saved_at, self.unsaved = time.monotonic(), 0.0

    def restart(self, *, counts: bool) -> None:
        """Begin the next step. counts: what was done since `take` is training time."""
        if not counts:
            self._mark = time.perf_counter()
        elif self._backend.world > 1:
            self._send()

    def _send(self) -> None:
        now, clock = time.perf_counter(), time.monotonic()
        seconds = self.seconds + now - self._mark
        values = self._stop.signal, seconds, clock - self._saved_at, clock - self._logged_at
        self._sent = self._backend.begin_all_reduce_max(values), now

    def _receive(self) -> None:
        assert self._sent is not None
        (result, self._mark), self._sent = self._sent, None
        self.signal, self.seconds, self.unsaved, self.unlogged = result()


class Stopped(Suspended):
    """Raised when the run was stopped by a signal, after saving, or while a step was compiled."""

    def __init__(self, number: int, step: int, *, command: str = "make resume") -> None:
        self.number, self.step = number, step
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step}", todo=f"{command} continues from there")


class Rescaled(Suspended):
    """Raised in place of Stopped where a node joins or leaves: the launch starts this process again."""

    label = ""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"a node joins or leaves: stopping after step {step}, from which training resumes")


def interrupted_text(status: Status, command: str) -> str:
    """Return what a user who interrupted a run needs to know: what is lost, and how `command` resumes it."""
    if status.state == "done":
        return "interrupted, but the run is done"
    if status.step:
        return f"interrupted; {command} resumes after step {status.step}"
    return f"interrupted before the first checkpoint; {command} begins again"


@contextmanager
def ended_once() -> Iterator[None]:
    """Ignore further SIGTERMs once Stopped is raised, because the program is ending.

    Raises Rescaled instead where that was no request to end the run.
    """
    try:
        yield
    except Stopped as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if restarts_by_itself():
            raise Rescaled(error.step) from error
        raise
