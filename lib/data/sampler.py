"""Order of samples as a pure function of (seed, epoch, size), independent of worker, rank and micro-batch.

Position p of the endless training stream is in epoch p // size, at index p % size of that epoch's order.
Optimizer step s with effective batch T takes positions [s*T, (s+1)*T), and each rank a slice of them, in the
order of ranks. Resuming therefore needs only the step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lib.data.types import Indices
from lib.rng import key, mix


@lru_cache(maxsize=2)  # a step may span two epochs
def epoch_order(*, seed: int, epoch: int, size: int) -> Indices:
    """Return the order of one epoch: a permutation of range(size), int64, read-only."""
    hashes = mix(mix(np.arange(size, dtype=np.int64) ^ key("order", seed, epoch)))
    order = np.argsort(hashes, kind="stable")
    order.setflags(write=False)
    return order


def sample_stream(*, start: int, count: int, seed: int, size: int) -> tuple[Indices, Indices]:
    """Return the epochs (N,) and sample indices (N,) of positions [start, start + count) of the stream."""
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


def with_partners(
    epochs_SN: Indices, indices_SN: Indices, *, seed: int, size: int
) -> tuple[Indices, Indices]:
    """Return epochs and indices of samples and of their partners in mixup and cutmix, (S, 2, N) each.

    A partner is one of all `size` samples, a function of the sample's own key, and is read along with it. A
    neighbour in the batch would save the read, but then no share and no micro-batch could separate a pair.
    So a mixed sample, too, is the same however a batch is split, and at whichever step a run resumes.
    """
    hashes_SN = mix(mix(indices_SN ^ mix(epochs_SN ^ key("partner", seed))))
    partners_SN = ((hashes_SN >> 32) & 0x7FFFFFFF) * size >> 31
    return np.stack((epochs_SN, epochs_SN), axis=1), np.stack((indices_SN, partners_SN), axis=1)


def window_shifts(epochs_N: Indices, *, seed: int, stride: int) -> Indices:
    """Return the shift of a text's windows in each epoch: (N,), in [0, stride), so that boundaries differ."""
    hashes = mix(mix(epochs_N ^ key("window", seed)))
    return ((hashes >> 32) & 0x7FFFFFFF) * stride >> 31
