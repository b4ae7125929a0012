"""A synthetic text of exactly known entropy rate: what no language model can do better than.

A Markov chain of order 2 over 32 characters. After any two characters the next is one of eight, with the
chances COUNTS / 64: four that follow from the last one alone and four from both. Which ones differs from
pair to pair, but the chances do not: the entropy of the next character is the same after every pair, so
that it is the entropy rate, whatever the stationary distribution.
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
# How many of 64 equally likely slots each follower has: those of the last character, then of both.
COUNTS = (24, 10, 4, 2), (14, 6, 3, 1)

_SLOTS = 64
_SEED = 20
Table = npt.NDArray[np.int64]


def entropy_bits() -> float:
    """The entropy rate, in bits per character."""
    chances = [count / _SLOTS for half in COUNTS for count in half]
    return -sum(chance * math.log2(chance) for chance in chances)


def markov() -> Corpus:
    """The text, which is the same on every machine; the parts are one after the other."""

    def read() -> Texts:
        text = _walk(transitions(), TRAIN_BYTES + VALIDATION_BYTES)
        remark = f"synthetic, entropy rate {entropy_bits():.4f} bits per byte"
        return Texts(text[:TRAIN_BYTES], text[TRAIN_BYTES:], remark)

    return Corpus("a Markov chain of order 2", f"markov {VERSION} {TRAIN_BYTES} {VALIDATION_BYTES}", read)


def transitions() -> Table:
    """(32, 32, 64): the slots of the character that follows the one before the last, and the last."""
    size, own = len(ALPHABET), len(COUNTS[0])
    slots = np.empty((size, size, _SLOTS), np.int64)
    for last in range(size):
        by_last = _order(key(_SEED, last))[:own]
        for before in range(size):
            by_both = [symbol for symbol in _order(key(_SEED, last, before)) if symbol not in by_last]
            slots[before, last] = np.repeat([*by_last, *by_both[:own]], [*COUNTS[0], *COUNTS[1]])
    return slots


def _order(seed: int) -> list[int]:
    """All characters in an order drawn by `seed`, the first ones of the alphabet tending to be earlier.

    Frequent pairs are learned from little text, rare ones from much.
    """
    size = len(ALPHABET)
    draws = (integers(seed, (size,), below=1 << 20) + 1) / (1 << 20)
    # Times to a first event at rates 1 / (rank + 1): the earliest is each with a chance by its rate.
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
