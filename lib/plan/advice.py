"""Micro-batch advised for the next start of a finished run, from its peak memory use. Pure.

LatentWire's rule for batches that follow the memory (document 001), as advice only: a run never changes its
own micro-batch by it, and the effective batch stays the same.
"""

from __future__ import annotations

from lib.plan.batch import divisors

TARGET = 0.75  # share of the memory, where CONFIG_ELASTIC_TARGET_UTIL is not set
TOO_FULL, FULL = 0.90, 0.80  # shares of the memory in use at the peak
HALF, LESS, MORE = 0.5, 0.75, 1.2  # factors on the micro-batch
NEAR, ROOMY = 0.15, 0.60  # the batch grows below target - NEAR and below ROOMY


def advised(micro_batch: int, *, share: int, norm_batch: int, filled: float, target: float = TARGET) -> int:
    """Return `micro_batch`, or the divisor of `share` and multiple of NORM_BATCH to start with instead.

    share: samples per device and optimizer step. norm_batch: 0 for none. filled: share of the device's memory
    in use at the peak. target: share of it to use. Memory grows by less than the micro-batch does, so that a
    batch scaled in proportion to `target` fits.
    """
    if filled > FULL:
        most = micro_batch * (HALF if filled > TOO_FULL else LESS)
    elif filled < min(target - NEAR, ROOMY):
        most = micro_batch * max(MORE, target / filled)
    else:
        return micro_batch
    sizes = [size for size in divisors(share) if size <= most and size % max(1, norm_batch) == 0]
    if filled <= FULL:
        sizes = [size for size in sizes if size > micro_batch]
    return max(sizes, default=micro_batch)
