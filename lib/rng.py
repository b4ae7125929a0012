"""Counter-based random numbers: a pure function of a key.

The 64-bit finaliser of SplitMix64 (Steele, Lea and Flood 2014) applied to a key. There is no state,
so any sample's numbers can be computed anywhere in any order. The one definition serves NumPy arrays
and torch tensors of dtype int64 alike: both wrap on overflow, and the logical shift is spelled as an
arithmetic shift and a mask.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

Words = TypeVar("Words", npt.NDArray[np.int64], torch.Tensor)
Floats = npt.NDArray[np.float32]

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    """Reinterpret a 64-bit word as int64."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def _shift_right(words: Words, bits: int) -> Words:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def mix(words: Words) -> Words:
    """Scramble int64 `words` of any shape, one to one; every input bit changes half of the output bits."""
    words = words + _signed(_GOLDEN)
    words = (words ^ _shift_right(words, 30)) * _signed(_MULTIPLY_1)
    words = (words ^ _shift_right(words, 27)) * _signed(_MULTIPLY_2)
    return words ^ _shift_right(words, 31)


def mix_int(word: int) -> int:
    """Apply `mix` to one number; returns a Python int in the range of int64."""
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * _MULTIPLY_1) & _MASK
    word = ((word ^ (word >> 27)) * _MULTIPLY_2) & _MASK
    return _signed(word ^ (word >> 31))


def key(*parts: int | str) -> int:
    """Combine numbers and names into one int64 key; the order of `parts` matters."""
    state = 0
    for part in parts:
        word = int.from_bytes(part.encode(), "little") if isinstance(part, str) else part
        assert word < 1 << 64, "names of keys have at most eight bytes"
        state = mix_int(state ^ word)
    return state


def uniform(seed: int, shape: tuple[int, ...], *, low: float = 0.0, high: float = 1.0) -> Floats:
    """Return float32 numbers in [low, high), the same on every machine. seed: a `key`."""
    count = int(np.prod(shape))
    words = mix(mix(np.arange(count, dtype=np.int64) ^ seed))
    # A float32 holds 24 bits exactly.
    unit = _shift_right(words, 40).astype(np.float32) * np.float32(2.0**-24)
    return (unit * np.float32(high - low) + np.float32(low)).reshape(shape)


def integers(seed: int, shape: tuple[int, ...], *, below: int) -> npt.NDArray[np.int64]:
    """Return int64 numbers in [0, below). seed: a `key`."""
    count = int(np.prod(shape))
    words = mix(mix(np.arange(count, dtype=np.int64) ^ seed))
    return (_shift_right(words, 32) * below >> 32).reshape(shape)


def noise_bytes(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return uniform bytes, eight from each hash, for noise on many pixels. seed: a `key`."""
    count = int(np.prod(shape))
    words = mix(np.arange(-(-count // 8), dtype=np.int64) ^ seed)
    return words.astype("<i8").view(np.uint8)[:count].reshape(shape)
