"""N-gram baselines for language models.

Interpolated Kneser-Ney smoothing with one discount per order (Chen and Goodman 1999, section 4.1.6).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lib.data.cache import cached_folder, fingerprint
from lib.data.types import Dataset, TextSpec, TokenPart, Tokens, Unit

ORDERS = 4
VERSION = 1  # raise it whenever a figure changes
_MAX_TOKENS = 1 << 24  # of either part; the beginning suffices, within seconds and a gigabyte

Keys = npt.NDArray[np.unsignedinteger[Any]]  # n-grams as numbers, first token most significant
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramBaseline:
    """Cross-entropies on the evaluation part, every token but the first predicted.

    bits:              per unit, of 1-grams, 2-grams and so on (up to 4; fewer with a huge vocabulary).
    bits_per_byte:     the same per byte of text; None without a tokenizer.
    train_tokens:      counted in the training part.
    validation_tokens: predicted in the evaluation part.
    truncated:         a part is longer than _MAX_TOKENS.
    """

    bits: tuple[float, ...]
    bits_per_byte: tuple[float, ...] | None
    unit: Unit
    train_tokens: int
    validation_tokens: int
    truncated: bool

    def __str__(self) -> str:
        """Return one line for the user."""
        figures, unit = (self.bits, self.unit) if self.bits_per_byte is None else (self.bits_per_byte, "byte")
        listed = " / ".join(f"{figure:.2f}" for figure in figures)
        where = f", the first {_MAX_TOKENS} of a part" if self.truncated else ""
        return f"{listed} bits per {unit} by counting 1- to {len(figures)}-grams of {self.unit}s{where}"


def ngram_baseline(dataset: Dataset, *, cache_dir: Path, log: Callable[[str], None]) -> NgramBaseline:
    """Return the baseline of a text, computed once and kept in `cache_dir`. Raises ToolkitError."""
    spec, train, test = dataset.spec, dataset.train, dataset.test
    assert isinstance(spec, TextSpec) and isinstance(train, TokenPart) and isinstance(test, TokenPart)
    counted, predicted = (np.asarray(part.tokens[:_MAX_TOKENS]) for part in (train, test))
    content = hashlib.sha256(counted.tobytes())
    content.update(predicted.tobytes())

    def fill(folder: Path) -> None:
        log(f"{spec.name}: counting n-grams of {len(counted)} {spec.unit}s")
        bits = list(cross_entropies(counted, predicted, vocab_size=spec.vocab_size))
        (folder / "bits.json").write_text(json.dumps(bits))

    identity = fingerprint("baseline", VERSION, spec.vocab_size, content.hexdigest())
    folder = cached_folder(cache_dir / f"baseline-{identity[:8]}", identity=identity, fill=fill, log=log)
    bits = tuple(json.loads((folder / "bits.json").read_text()))
    targets, per_byte = predicted[1:], None
    if dataset.tokenizer is not None:
        text_bytes = int(dataset.tokenizer.byte_lengths()[targets].sum())
        per_byte = tuple(figure * len(targets) / text_bytes for figure in bits)
    return NgramBaseline(
        bits=bits,
        bits_per_byte=per_byte,
        unit=spec.unit,
        train_tokens=len(counted),
        validation_tokens=len(targets),
        truncated=max(len(train.tokens), len(test.tokens)) > _MAX_TOKENS,
    )


def cross_entropies(counted: Tokens, predicted: Tokens, *, vocab_size: int) -> tuple[float, ...]:
    """Return bits per token of predicted[1:] by n-grams of `counted`, n = 1, 2, ... up to 4."""
    orders = [order for order in range(1, ORDERS + 1) if vocab_size**order <= 1 << 64]
    tables = [np.unique(_keys(counted, order, vocab_size), return_counts=True) for order in orders]
    bits = []
    # For unseen n-grams: shorter contexts, weighted by the number of longer n-grams that end so.
    shorter = np.full(len(predicted), 1 / vocab_size)
    for order, table in zip(orders, tables, strict=True):
        keys = _keys(predicted, order, vocab_size)
        longest = _interpolated(*table, keys, vocab_size, shorter)
        bits.append(float(-np.log2(longest[1:]).mean()))
        if order < len(orders):
            longer, _ = tables[order]
            endings = (longer % longer.dtype.type(vocab_size**order)).astype(keys.dtype)
            shorter = _interpolated(*np.unique(endings, return_counts=True), keys, vocab_size, shorter)
    return tuple(bits)


def _interpolated(known: Keys, counts: Counts, keys: Keys, vocab_size: int, shorter: Floats) -> Floats:
    """Return the probabilities of `keys`, interpolated with those of shorter contexts.

    known: distinct n-grams in ascending order, with their counts. shorter: probabilities of all tokens by
    shorter contexts, which the first tokens keep.
    """
    once, twice = ((counts == count).sum() for count in (1, 2))
    # Reserves mass for unseen n-grams even if every n-gram is frequent.
    discount = once / (once + 2 * twice) if once else 0.5
    radix = known.dtype.type(vocab_size)
    contexts, starts = np.unique(known // radix, return_index=True)
    totals, kinds = np.add.reduceat(counts, starts), np.diff(np.append(starts, len(known)))
    count = _lookup(known, counts, keys)
    total, kind = (_lookup(contexts, values, keys // radix) for values in (totals, kinds))
    alone = len(shorter) - len(keys)
    backed_off = shorter[alone:]
    mixed = (np.maximum(count - discount, 0) + discount * kind * backed_off) / np.maximum(total, 1)
    return np.concatenate((shorter[:alone], np.where(total > 0, mixed, backed_off)))


def _keys(tokens: Tokens, order: int, vocab_size: int) -> Keys:
    """Encode the n-gram that ends at each token from the order-th on as a number."""
    dtype = np.uint32 if vocab_size**order <= 1 << 32 else np.uint64
    size = max(0, len(tokens) - order + 1)
    keys: Keys = np.zeros(size, dtype)
    for place in range(order):
        keys = keys * dtype(vocab_size) + tokens[place : place + size].astype(dtype)
    return keys


def _lookup(known: Keys, values: Counts, keys: Keys) -> Floats:
    """Return the value of each of `keys` among the ascending `known`, 0 for unknown ones."""
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    found: Floats = np.where(known[places] == keys, values[places], 0).astype(np.float64)
    return found
