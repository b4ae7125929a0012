"""A synthetic text of exactly known entropy rate, the lower bound of any language model's loss.

A Markov chain of order 2 over 32 characters. After any two characters the next is one of eight, with
probabilities COUNTS / 64: four depend on the last character alone and four on both. The entropy of the next
character is the same after every pair, and so is the entropy rate.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lib.data.datasets.texts.corpus import Corpus, Texts
from lib.rng import integers, key

VERSION = 1  # raise it whenever a character changes
TRAIN_BYTES, VALIDATION_BYTES = 4_000_000, 250_000

ALPHABET = b"abcdefghijklmnopqrstuvwxyz ,.;:-"
# Probabilities in 64ths of the followers by the last character, then of those by both.
COUNTS = (24, 10, 4, 2), (14, 6, 3, 1)

_SLOTS = 64
_SEED = 20
Table = npt.NDArray[np.int64]


def entropy_bits() -> float:
    """Return the entropy rate in bits per character."""
    chances = [count / _SLOTS for half in COUNTS for count in half]
    return -sum(chance * math.log2(chance) for chance in chances)


def markov() -> Corpus:
    """Return the text, identical on every machine; validation follows training."""

    def read() -> Texts:
        text = _walk(transitions(), TRAIN_BYTES + VALIDATION_BYTES)
        remark = f"synthetic, entropy rate {entropy_bits():.4f} bits per byte"
        return Texts(text[:TRAIN_BYTES], text[TRAIN_BYTES:], remark)

    return Corpus("a Markov chain of order 2", f"markov {VERSION} {TRAIN_BYTES} {VALIDATION_BYTES}", read)


def transitions() -> Table:
    """Return the next characters by the last two, (32, 32, 64) equally likely slots."""
    size, own = len(ALPHABET), len(COUNTS[0])
    slots = np.empty((size, size, _SLOTS), np.int64)
    for last in range(size):
        by_last = _order(key(_SEED, last))[:own]
        for before in range(size):
            by_both = [symbol for symbol in _order(key(_SEED, last, before)) if symbol not in by_last]
            slots[before, last] = np.repeat([*by_last, *by_both[:own]], [*COUNTS[0], *COUNTS[1]])
    return slots


def _order(seed: int) -> list[int]:
    """Draw an order of the characters in which the first ones of the alphabet tend to be earlier.

    So that some pairs are frequent and learned from little text, and others rare.
    """
    size = len(ALPHABET)
    draws = (integers(seed, (size,), below=1 << 20) + 1) / (1 << 20)
    # Exponential times at rates 1 / (rank + 1) give a weighted random order.
    return [int(symbol) for symbol in np.argsort(-np.log(draws) * (np.arange(size) + 1), kind="stable")]


def _walk(slots: Table, length: int) -> bytes:
    size = len(ALPHABET)
    draws = integers(key(_SEED, "walk"), (length,), below=_SLOTS).tolist()
    following = slots.ravel().tolist()
    pair, text = 0, bytearray(length)
    for place, draw in enumerate(draws):
        symbol = following[pair * _SLOTS + draw]
        text[place] = symbol
        pair = pair % size * size + symbol
    return bytes(text).translate(ALPHABET + bytes(range(len(ALPHABET), 256)))
