"""SIGINT and SIGTERM as requests to stop, which the training loop obeys at the end of a step."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from lib.distributed.launcher import restarts_by_itself
from lib.errors import Suspended

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

    announce: print to standard error that the first signal was received, because a step may be long.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self._announce = announce
        self.signal = 0  # number of the signal received, 0 = none
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _remember(self, number: int, _frame: types.FrameType | None) -> None:
        if self.signal:
            return
        self.signal = number
        if self._announce:  # a stream may be in the middle of a write, a file descriptor cannot
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; SIGINT now ends at once\n")
        signal.signal(signal.SIGINT, self._previous.pop(signal.SIGINT))


class Stopped(Suspended):
    """Raised when the run was stopped by a signal, after saving."""

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
