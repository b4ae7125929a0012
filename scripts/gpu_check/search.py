"""Pure parts of the checks: the largest size that works, and sizes to compare."""

from __future__ import annotations

import time
from collections.abc import Callable

RESOLUTION = 50  # a search ends within a fiftieth of the largest size


def largest(works: Callable[[int], bool], *, start: int, step: int, most: int) -> int:
    """The largest multiple of `step` up to `most` that works, to within 2 %; 0 where not even `step` does.

    works: true up to some size and false from there on; called as rarely as a good `start` allows.
    """
    low, high, failed = 0, (most // step + 1) * step, False  # low works, high does not or is too large
    size = max(step, min(start, most) // step * step)
    jump = max(step, size // 16 // step * step)
    while high - low > max(step, low // RESOLUTION // step * step):
        if works(size):
            low, jump = size, 2 * jump
        else:
            high, failed = size, True
        size = _middle(low, high, step) if failed else min(low + jump, high - step)
    return low


def ladder(size: int, *, step: int) -> tuple[int, ...]:
    """An eighth, a quarter, a half and all of `size`, in multiples of `step`, smallest first."""
    sizes = {max(step, size // part // step * step) for part in (8, 4, 2, 1)}
    return tuple(sorted(sizes))


class Deadline:
    """How much of `seconds` is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left_seconds == 0


def _middle(low: int, high: int, step: int) -> int:
    return max(low + step, (low + high) // 2 // step * step)
