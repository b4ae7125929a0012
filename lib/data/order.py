"""Which sample comes when: a pure function of (seed, epoch, size), never of worker, rank or micro-batch.

The training stream is endless: its position p is in epoch p // size, at place p % size of
that epoch's order. Optimizer step s of an effective batch T takes positions [s*T, (s+1)*T), and
rank r of w the r-th of w equal slices of them. Resuming therefore needs only the step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lib.data.rng import key, mix
from lib.data.types import Indices, Part
from lib.errors import ConfigError


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


def subset(part: Part, *, limit: int = 0, holdout: int = 0) -> tuple[Part, Part | None]:
    """Cut a training part by DATA_LIMIT and HOLDOUT (0 = off): what to train on, and the held-out samples.

    Both are taken from one fixed permutation that depends on the size of the part alone, so neither
    the seed of the run nor `limit` changes what is held out. Raises ConfigError where samples lack.
    """
    if limit + holdout > part.size or (holdout and holdout == part.size):
        raise ConfigError(
            f"CONFIG_DATA_LIMIT={limit} and CONFIG_HOLDOUT={holdout} need more samples than there are",
            why=f"the training part has {part.size}",
            todo="lower them (0 = all, none)",
        )
    if not limit and not holdout:
        return part, None
    order = epoch_order(seed=0, epoch=0, size=part.size)
    rows = order if part.rows is None else part.rows[order]
    kept = rows[: limit or part.size - holdout]
    held_out = Part(part.images, part.labels, np.sort(rows[part.size - holdout :])) if holdout else None
    # Rising positions: a memory map is then read in the order it is stored.
    return Part(part.images, part.labels, np.sort(kept)), held_out
