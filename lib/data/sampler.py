"""Which samples a run takes, in which order: functions of (seed, epoch, size), not of workers or ranks.

Position p of the endless training stream is in epoch p // size, at index p % size of that epoch's order.
Optimizer step s with effective batch T takes positions [s*T, (s+1)*T), and each rank a slice of them, in the
order of ranks. Resuming therefore needs only the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from threading import Thread
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lib.data.types import Dataset, Indices, Part, TextSpec, Tokenizer, TokenPart
from lib.errors import ConfigError
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


@runtime_checkable
class ChecksHoldout(Protocol):
    """A spec whose data cannot always be split for validation."""

    def check_held_out(self, train: Part, held_out: Part) -> None:
        """Raise ConfigError if samples of `held_out` leak from `train`."""


@runtime_checkable
class HasLengths(Protocol):
    """A spec of rows of tokens, which may be cut where their samples end."""

    bucketed: bool  # they are: each step's samples go by length into micro-batches

    def lengths(self, part: Part) -> Indices:
        """Return the number of tokens of each row that count (N,), at least 1."""


def by_length(indices_SN: Indices, lengths: Indices) -> Indices:
    """Return the samples of each step (S, N), the longest first.

    Which samples a step has does not change, so neither does what it computes, but for rounding. Sorting all
    of an epoch would leave less padding, and make steps of short samples alone, whose tokens weigh more.
    """
    order_SN = np.argsort(-lengths[indices_SN], axis=1, kind="stable")
    return np.take_along_axis(indices_SN, order_SN, axis=1)


def cut_lengths(lengths: Indices, *, size: int, choices: int) -> Indices:
    """Return the lengths to which rows of `size` tokens are cut: at most `choices` different ones."""
    unit = -(-size // choices)
    return np.minimum(-(-lengths // unit) * unit, size)


def window_shifts(epochs_N: Indices, *, seed: int, stride: int) -> Indices:
    """Return the shift of a text's windows in each epoch: (N,), in [0, stride), so that boundaries differ."""
    hashes = mix(mix(epochs_N ^ key("window", seed)))
    return ((hashes >> 32) & 0x7FFFFFFF) * stride >> 31


def restrict(dataset: Dataset, *, limit: int = 0, holdout: int = 0, opened: bool = True) -> Dataset:
    """Apply DATA_LIMIT and HOLDOUT (0 = off); held-out samples replace the test part.

    opened: false for metadata. Raises ConfigError for too few samples, or ones that cannot be held out.
    """
    train, held_out = subset(dataset.train, limit=limit, holdout=holdout)
    if held_out is None:
        return replace(dataset, train=train)
    spec = dataset.spec
    if isinstance(spec, ChecksHoldout) and opened:
        spec.check_held_out(train, held_out)
    if isinstance(spec, TextSpec):
        assert isinstance(held_out, TokenPart)
        spec = with_lengths(spec, held_out, dataset.tokenizer)
    return replace(dataset, spec=spec, train=train, test=held_out)


def subset(part: Part, *, limit: int = 0, holdout: int = 0) -> tuple[Part, Part | None]:
    """Split a training part by DATA_LIMIT and HOLDOUT (0 = off) into training and held-out samples.

    Rows are drawn from one permutation that depends on the size of the part alone, so neither the seed nor
    `limit` changes the held-out samples. Of a text the end is held out, which shifted windows never reach.
    Raises ConfigError if there are too few samples.
    """
    if limit + holdout > part.size or (holdout and holdout == part.size):
        raise ConfigError(
            f"CONFIG_DATA_LIMIT={limit} and CONFIG_HOLDOUT={holdout} need more samples than there are",
            why=f"the training part has {part.size}",
            todo="lower them (0 = all, none)",
        )
    if not limit and not holdout:
        return part, None
    kept = limit or part.size - holdout
    if isinstance(part, TokenPart):
        assert part.shifted, "only training parts are split"
        windows = (kept + 1) * part.block_size  # one more for the shift
        end = holdout * part.block_size + 1  # includes the token that predicts the first held-out one
        tokens = TokenPart(part.tokens[-end:], part.block_size) if holdout else None
        return replace(part, tokens=part.tokens[:windows]), tokens
    order = epoch_order(seed=0, epoch=0, size=part.size)
    rows = order if part.rows is None else part.rows[order]
    # Sorted, so that a memory map is read sequentially.
    held_out = replace(part, rows=np.sort(rows[part.size - holdout :])) if holdout else None
    return replace(part, rows=np.sort(rows[:kept])), held_out


def with_lengths(spec: TextSpec, part: TokenPart, tokenizer: Tokenizer | None) -> TextSpec:
    """Return `spec` with the lengths of the evaluation part."""
    targets = np.asarray(part.tokens[1:])
    text_bytes = None
    if tokenizer is not None:
        counts = np.bincount(targets, minlength=tokenizer.vocab_size)
        text_bytes = int(counts @ tokenizer.byte_lengths())
    return replace(spec, validation_tokens=len(targets), validation_bytes=text_bytes)


def held_out_by_hash(keys: Iterable[str], percent: int) -> npt.NDArray[np.bool_]:
    """Return which samples are for validation (N,): by SHA-256 of their keys, so that none moves another."""
    limit = percent / 100 * 2**64
    # A name of a file may be no UTF-8.
    digests = (hashlib.sha256(key.encode(errors="surrogateescape")).digest() for key in keys)
    return np.array([int.from_bytes(digest[:8], "big") < limit for digest in digests], np.bool_)
