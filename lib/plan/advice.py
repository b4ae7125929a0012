"""Which micro-batch a run that ends advises the next start to take, by how full the memory was. Pure.

LatentWire's rule for batches that follow the memory (document 001), as advice: a run never changes its own
micro-batch by it, and the effective batch stays what it is.
"""

from __future__ import annotations

from lib.plan.batch import divisors

TARGET = 0.75  # of the memory, where CONFIG_ELASTIC_TARGET_UTIL says nothing
TOO_FULL, FULL = 0.90, 0.80  # of the memory at the peak
HALF, LESS, MORE = 0.5, 0.75, 1.2  # times the micro-batch
NEAR, ROOMY = 0.15, 0.60  # below the target, and of the memory: with more than that nothing is gained


def advised(micro_batch: int, *, share: int, norm_batch: int, filled: float, target: float = TARGET) -> int:
    """The micro-batch to start with: a divisor of `share` and a multiple of NORM_BATCH, or the same again.

    share: samples of a device in an optimizer step. norm_batch: 0 for none. filled: of the device's memory at
    the peak. target: the share of it that is to be used. Memory grows by less than the micro-batch, so that
    what `target` has room for by proportion fits.
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
