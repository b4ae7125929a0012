"""Questions that need nothing but the text: two facts and a key, of which the value is wanted.

"k=vv m=ww ?m" is answered by "ww". Keys are one letter of four, values two of sixteen; every text is
generated from its number, the same on every machine, and none of the test part is in the training part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from lib.rng import integers, key

VERSION = 1
KEYS, LETTERS = "abcd", "abcdefghijklmnop"  # with more keys, a lookup takes longer to be learned
TRAIN_SIZE, TEST_SIZE = 65_536, 512
ANCHOR = " A="  # between a text and its answer

PartName: TypeAlias = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Question:
    """A text that ends in a question, and how the answer goes on after the anchor: it ends a line."""

    source: str
    answer: str


def questions(part: PartName) -> list[Question]:
    """All of a part: TRAIN_SIZE or TEST_SIZE."""
    if part == "train":
        return _drawn("train", TRAIN_SIZE)
    seen = {question.source for question in _drawn("train", TRAIN_SIZE)}
    # About one in 25 is in the training part.
    fresh = [question for question in _drawn("test", 2 * TEST_SIZE) if question.source not in seen]
    return fresh[:TEST_SIZE]


def _drawn(part: PartName, count: int) -> list[Question]:
    below = (len(KEYS), len(KEYS) - 1, 2, *[len(LETTERS)] * 4)
    columns = [
        integers(key("facts", part, number), (count,), below=limit) for number, limit in enumerate(below)
    ]
    return [_question(*row) for row in np.stack(columns, axis=1).tolist()]


def _question(first: int, further: int, asked: int, *values: int) -> Question:
    keys = KEYS[first], KEYS[(first + 1 + further) % len(KEYS)]
    a, b, c, d = (LETTERS[value] for value in values)
    pairs = a + b, c + d
    facts = " ".join(f"{name}={value}" for name, value in zip(keys, pairs, strict=True))
    return Question(f"{facts} ?{keys[asked]}", f"{pairs[asked]}\n")
