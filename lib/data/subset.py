"""What is cut out of the training part: trials on few samples, and samples held out for validation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lib.data.sampler import epoch_order
from lib.data.types import ArrayPart, Dataset, Part, PuzzleSpec, TextSpec, Tokenizer, TokenPart
from lib.errors import ConfigError


def restrict(dataset: Dataset, *, limit: int = 0, holdout: int = 0, opened: bool = True) -> Dataset:
    """`dataset` cut by DATA_LIMIT and HOLDOUT (0 = off); held-out samples take the place of the test part.

    opened: its samples are there, and not zeros in their place (`lib.data.metadata`).

    Raises ConfigError where samples lack, or where puzzles held out have solutions that are trained on.
    """
    train, held_out = subset(dataset.train, limit=limit, holdout=holdout)
    if held_out is None:
        return replace(dataset, train=train)
    spec = dataset.spec
    if isinstance(spec, PuzzleSpec) and opened:
        _check_solutions(train, held_out, holdout=holdout)
    if isinstance(spec, TextSpec):
        assert isinstance(held_out, TokenPart)
        spec = measured(spec, held_out, dataset.tokenizer)
    return replace(dataset, spec=spec, train=train, test=held_out)


def subset(part: Part, *, limit: int = 0, holdout: int = 0) -> tuple[Part, Part | None]:
    """Cut a training part by DATA_LIMIT and HOLDOUT (0 = off): what to train on, and the held-out samples.

    Rows are taken from one fixed permutation that depends on the size of the part alone, so neither
    the seed of the run nor `limit` changes what is held out. Of a text the end is held out and the
    beginning trained on: its windows move from epoch to epoch and must not run into what is held out.
    Raises ConfigError where samples lack.
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
        return _cut_tokens(part, kept=kept, holdout=holdout)
    return _cut_rows(part, kept=kept, holdout=holdout)


def measured(spec: TextSpec, part: TokenPart, tokenizer: Tokenizer | None) -> TextSpec:
    """`spec` with the lengths of `part`, on which the model is evaluated."""
    targets = np.asarray(part.tokens[1:])
    text_bytes = None
    if tokenizer is not None:
        counts = np.bincount(targets, minlength=tokenizer.vocab_size)
        text_bytes = int(counts @ tokenizer.byte_lengths())
    return replace(spec, validation_tokens=len(targets), validation_bytes=text_bytes)


def _check_solutions(train: Part, held_out: Part, *, holdout: int) -> None:
    """A solution that was seen is no test of solving."""
    solutions = [{row.tobytes() for row in part.take()[1]} for part in (train, held_out)]
    if shared := len(solutions[0] & solutions[1]):
        raise ConfigError(
            f"CONFIG_HOLDOUT={holdout} holds out puzzles with {shared} solutions that are trained on",
            todo="leave it at 0: the test part has solutions of its own",
        )


def _cut_rows(part: ArrayPart, *, kept: int, holdout: int) -> tuple[ArrayPart, ArrayPart | None]:
    order = epoch_order(seed=0, epoch=0, size=part.size)
    rows = order if part.rows is None else part.rows[order]
    held_out = replace(part, rows=np.sort(rows[part.size - holdout :])) if holdout else None
    # Rising positions: a memory map is then read in the order it is stored.
    return replace(part, rows=np.sort(rows[:kept])), held_out


def _cut_tokens(part: TokenPart, *, kept: int, holdout: int) -> tuple[TokenPart, TokenPart | None]:
    assert part.shifted, "only training parts are cut"
    windows = (kept + 1) * part.block_size  # one more, for the shift
    train = replace(part, tokens=part.tokens[:windows])
    # The token before the first one held out is what that one is predicted from.
    end = holdout * part.block_size + 1
    return train, TokenPart(part.tokens[-end:], part.block_size) if holdout else None
