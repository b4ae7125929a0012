"""SIGINT and SIGTERM as a wish that the loop grants at the end of a step."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from lib.errors import Suspended

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def importing() -> Iterator[None]:
    """Within, SIGINT ends the program at once, as it ends programs that know no signals, and no garbage is
    looked for, then or ever, among what there is by its end.

    numpy's tie to torch swallows whatever is raised while it is made, and the program would go on with
    half of a library. Modules stay for good: to search them for garbage again and again is a sixth of the
    time that importing torch takes.
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
    """While entered, the first signal is only remembered; a SIGINT after it ends the program at once.

    A SIGTERM after it changes nothing: schedulers send it to every process of a job and some twice, and
    have SIGKILL for those that do not end.

    told: whether standard error says that the first one was understood, for a step may be long.
    """

    def __init__(self, *, told: bool = False) -> None:
        self._told = told
        self.signal = 0  # number of the signal that came, 0 = none
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, _frame: types.FrameType | None) -> None:
        if self.signal:
            return
        self.signal = number
        if self._told:  # a stream may be in the middle of a write, a file descriptor cannot be
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step; SIGINT ends at once\n")
        signal.signal(signal.SIGINT, self._previous.pop(signal.SIGINT))

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


class Stopped(Suspended):
    """The run was asked to stop by a signal, and saved."""

    def __init__(self, number: int, step: int) -> None:
        self.step = step
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step}", todo="make resume goes on from there")


@contextmanager
def ended_once() -> Iterator[None]:
    """What Stopped leaves is a program that ends: from then on SIGTERM, which may come again, is ignored."""
    try:
        yield
    except Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
