"""Subsets of the training part: DATA_LIMIT for trials, HOLDOUT for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lib.data.sampler import epoch_order
from lib.data.types import ChecksHoldout, Dataset, Part, TextSpec, Tokenizer, TokenPart
from lib.errors import ConfigError


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
    digests = (hashlib.sha256(key.encode()).digest() for key in keys)
    return np.array([int.from_bytes(digest[:8], "big") < limit for digest in digests], np.bool_)
