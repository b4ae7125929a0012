"""Split of one device's share of the effective batch into micro-batches, in integers only.

`per_device` is the share (target / devices), `bound` the most samples that fit on the device at once. Every
micro-batch is a multiple of `step`. The sizes add up to `per_device` exactly, or there is no split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import isqrt

LARGEST_TARGET = 1_048_576  # upper end of the range of CONFIG_TARGET_EFFECTIVE_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`accumulation` micro-batches: all of `micro_batch` samples except the last, of `last_micro_batch`."""

    micro_batch: int
    accumulation: int
    last_micro_batch: int

    @property
    def samples(self) -> int:
        """Samples per device and optimizer step."""
        return self.micro_batch * (self.accumulation - 1) + self.last_micro_batch

    @classmethod
    def of(cls, per_device: int, *, micro_batch: int) -> Split:
        """Split `per_device` samples into micro-batches of `micro_batch` and a remainder."""
        full, rest = divmod(per_device, micro_batch)
        return cls(
            micro_batch=micro_batch,
            accumulation=full + bool(rest),
            last_micro_batch=rest or micro_batch,
        )


def largest_micro_batch(per_device: int, *, bound: int, step: int, divisor_only: bool) -> int | None:
    """Return the micro-batch to use, in samples; None where no good split exists.

    A divisor if one is at least 80 % of what fits, else what fits, with a smaller last micro-batch. With
    `divisor_only` always a divisor, or None if the best one leaves more than half of what fits unused. Needs
    1 <= bound and step <= bound.
    """
    step = step or 1
    if per_device % step:
        return None
    fits = min(bound, per_device)
    divisor = step * _largest_divisor(per_device // step, limit=fits // step)
    if divisor_only:
        return divisor if 2 * divisor >= fits else None
    return divisor if 5 * divisor >= 4 * fits else fits - fits % step


def split_under(per_device: int, *, bound: int, step: int = 0, divisor_only: bool = False) -> Split | None:
    """Split the share into micro-batches of at most `bound` samples, multiples of `step` (0: of any size)."""
    micro_batch = largest_micro_batch(per_device, bound=bound, step=step, divisor_only=divisor_only)
    return None if micro_batch is None else Split.of(per_device, micro_batch=micro_batch)


def split_by(per_device: int, *, micro_batch: int, divisor_only: bool = False) -> Split | None:
    """Split the share into micro-batches of a size set by hand; None where that is impossible."""
    if micro_batch > per_device or (divisor_only and per_device % micro_batch):
        return None
    return Split.of(per_device, micro_batch=micro_batch)


def nearest_targets(
    target: int, *, world: int, works: Callable[[int], bool], largest: int = LARGEST_TARGET
) -> tuple[int, ...]:
    """Return the nearest effective batch below `target` and the nearest above it that can be planned.

    works: predicate, true if a share of so many samples per device can be split. Fewer than two are returned
    where one side has none between 1 and `largest`.
    """
    top = min(largest, LARGEST_TARGET) // world
    below = filter(works, range(min((target - 1) // world, top), 0, -1))
    above = filter(works, range(target // world + 1, top + 1))
    return tuple(share * world for side in (below, above) for share in islice(side, 1))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of `number` in ascending order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


# LatentWire's rule for batches that follow the memory, as advice only: a run never changes
# its own micro-batch by it, and the effective batch stays the same.
TARGET_UTIL = 0.75  # share of the memory, where CONFIG_ELASTIC_TARGET_UTIL is not set
TOO_FULL, FULL = 0.90, 0.80  # shares of the memory in use at the peak
HALF, LESS, MORE = 0.5, 0.75, 1.2  # factors on the micro-batch
NEAR, ROOMY = 0.15, 0.60  # the batch grows below target - NEAR and below ROOMY


def advised_micro_batch(
    micro_batch: int, *, share: int, norm_batch: int, filled: float, target: float = TARGET_UTIL
) -> int:
    """Return `micro_batch`, or the divisor of `share` and multiple of NORM_BATCH to start with instead.

    share: samples per device and optimizer step. norm_batch: 0 for none. filled: share of the device's memory
    in use at the peak. target: share of it to use. Memory grows by less than the micro-batch does, so that a
    batch scaled in proportion to `target` fits.
    """
    if filled > FULL:
        limit = micro_batch * (HALF if filled > TOO_FULL else LESS)
    elif filled < min(target - NEAR, ROOMY):
        limit = micro_batch * max(MORE, target / filled)
    else:
        return micro_batch
    sizes = [size for size in divisors(share) if size <= limit and size % max(1, norm_batch) == 0]
    if filled <= FULL:
        sizes = [size for size in sizes if size > micro_batch]
    return max(sizes, default=micro_batch)


def _largest_divisor(number: int, *, limit: int) -> int:
    ascending = divisors(number)
    return ascending[bisect_right(ascending, limit) - 1]
