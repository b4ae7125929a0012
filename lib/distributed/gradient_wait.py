"""Communication that the backward pass did not hide: a rank waits for the gradients of others."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor


class GradientWait:
    """Time between the last gradient of a rank and the end of DDP's reduction, on the device's own clock.

    On a CPU that is time of the host, which waits there. On a GPU two events on the stream of the backward
    pass are read once both are over, so that the host never waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    @contextlib.contextmanager
    def after(self, loss: Tensor) -> Iterator[None]:
        """Time the backward pass of `loss` within this context."""
        marks: list[float | torch.cuda.Event] = []

        def mark() -> None:
            marks.append(_event() if self._on_gpu else time.perf_counter())

        # Callbacks of a backward pass run in order at its end; DDP queues its wait with the last gradient.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        handle = loss.register_hook(lambda _: queue(mark))  # type: ignore[no-untyped-call]
        yield
        handle.remove()
        mark()
        begin, end = marks
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._open.append((begin, end))
        elif isinstance(begin, float) and isinstance(end, float):
            self._seconds += end - begin

    def seconds(self) -> float:
        """Return the seconds so far, on a GPU those of steps that it has ended."""
        while self._open and self._open[0][1].query():  # type: ignore[no-untyped-call]
            begin, end = self._open.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        return self._seconds


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
