"""Order of samples as a pure function of (seed, epoch, size), independent of worker, rank and micro-batch.

Position p of the endless training stream is in epoch p // size, at index p % size of that epoch's order.
Optimizer step s with effective batch T takes positions [s*T, (s+1)*T), and each rank a slice of them, in the
order of ranks. Resuming therefore needs only the step.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import lru_cache
from threading import Thread
from typing import NamedTuple

import numpy as np

from lib.data.types import Indices
from lib.rng import key, mix

_AHEAD_SIZE = 1 << 18  # samples; smaller orders take less than 10 ms, and most runs have few epochs


_HASHED = 1 << 17  # hashes at once, whose arrays stay in a CPU's cache


class _Epoch(NamedTuple):
    seed: int
    epoch: int
    size: int


_ahead: dict[_Epoch, Future[Indices]] = {}  # the order that a thread computes, until it is taken


@lru_cache(maxsize=2)  # a step may span two epochs
def epoch_order(*, seed: int, epoch: int, size: int) -> Indices:
    """Return the order of one epoch: a permutation of range(size), int64, read-only."""
    ready = _ahead.pop(which := _Epoch(seed, epoch, size), None)
    return _order(*which) if ready is None else ready.result()


def _order(seed: int, epoch: int, size: int) -> Indices:
    hashes, own = np.empty(size, np.int64), key("order", seed, epoch)
    for start in range(0, size, _HASHED):
        stop = min(start + _HASHED, size)
        hashes[start:stop] = mix(mix(np.arange(start, stop, dtype=np.int64) ^ own))
    order = np.argsort(hashes)  # there are no ties: `mix` is one to one
    order.setflags(write=False)
    return order


def _begin(which: _Epoch) -> None:
    """Compute the order of an epoch on a thread: sorting releases the GIL."""
    if which in _ahead:
        return
    _ahead.clear()
    future = _ahead[which] = Future[Indices]()

    def compute() -> None:
        try:
            future.set_result(_order(*which))
        except MemoryError as error:
            future.set_exception(error)

    # It is of no use once the program ends, which must not wait for it.
    Thread(target=compute, name="order", daemon=True).start()


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
        if size >= _AHEAD_SIZE and place + step > size // 2:
            _begin(_Epoch(seed, epoch + 1, size))
    return np.concatenate(epochs), np.concatenate(indices)


def window_shifts(epochs_N: Indices, *, seed: int, stride: int) -> Indices:
    """Return the shift of a text's windows in each epoch: (N,), in [0, stride), so that boundaries differ."""
    hashes = mix(mix(epochs_N ^ key("window", seed)))
    return ((hashes >> 32) & 0x7FFFFFFF) * stride >> 31
