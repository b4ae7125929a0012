"""Which sample comes when: a pure function of (seed, epoch, size), never of worker, rank or micro-batch.

The training stream is endless: its position p is in epoch p // size, at place p % size of
that epoch's order. Optimizer step s of an effective batch T takes positions [s*T, (s+1)*T), and
rank r of w the r-th of w equal slices of them. Resuming therefore needs only the step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lib.data.types import Indices
from lib.rng import key, mix


@lru_cache(maxsize=2)  # a step may straddle two epochs
def epoch_order(*, seed: int, epoch: int, size: int) -> Indices:
    """The order of one epoch: a permutation of range(size), int64, read-only."""
    hashes = mix(mix(np.arange(size, dtype=np.int64) ^ key("order", seed, epoch)))
    order = np.argsort(hashes, kind="stable")
    order.setflags(write=False)
    return order


def sample_stream(*, start: int, count: int, seed: int, size: int) -> tuple[Indices, Indices]:
    """Positions [start, start + count) of the endless stream: their epochs (N,) and sample indices (N,)."""
    assert start >= 0 and count >= 0 and size > 0
    epochs, indices = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    position, end = start, start + count
    while position < end:
        epoch, place = divmod(position, size)
        step = min(end - position, size - place)
        indices.append(epoch_order(seed=seed, epoch=epoch, size=size)[place : place + step])
        epochs.append(np.full(step, epoch, np.int64))
        position += step
    return np.concatenate(epochs), np.concatenate(indices)


def window_shifts(epochs_N: Indices, *, seed: int, stride: int) -> Indices:
    """By how many tokens the windows of a text begin later in each epoch: (N,), each in [0, stride).

    Otherwise every epoch would cut a text at the same places, and no window would go across them.
    """
    hashes = mix(mix(epochs_N ^ key("window", seed)))
    return ((hashes >> 32) & 0x7FFFFFFF) * stride >> 31
