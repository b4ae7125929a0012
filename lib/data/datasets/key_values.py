"""Synthetic questions about short texts, identical on every machine.

A text has two facts and a key: "k=vv m=ww ?m" is answered by "ww". Texts are generated from their numbers. No
test text is in the training part.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from lib.rng import integers, key

KEYS, LETTERS = "abcd", "abcdefghijklmnop"  # more keys take longer to learn
TRAIN_SIZE, TEST_SIZE = 65_536, 512

PartName: TypeAlias = Literal["train", "test"]


class Question(NamedTuple):
    """A text that ends in a question, and the answer that follows the anchor, with its line end."""

    source: str
    answer: str


def questions(part: PartName) -> tuple[Question, ...]:
    """Return the TRAIN_SIZE or TEST_SIZE questions of a part."""
    train = _drawn("train", TRAIN_SIZE)
    if part == "train":
        return train
    seen = {question.source for question in train}
    # About one in 25 is in the training part.
    fresh = (question for question in _drawn("test", 2 * TEST_SIZE) if question.source not in seen)
    return tuple(islice(fresh, TEST_SIZE))


@cache  # both parts need those for training
def _drawn(part: PartName, count: int) -> tuple[Question, ...]:
    below = (len(KEYS), len(KEYS) - 1, 2, *[len(LETTERS)] * 4)
    columns = [integers(key("facts", part, n), (count,), below=limit) for n, limit in enumerate(below)]
    return tuple(_question(*row) for row in np.stack(columns, axis=1).tolist())


def _question(first: int, further: int, requested: int, *values: int) -> Question:
    keys = KEYS[first], KEYS[(first + 1 + further) % len(KEYS)]
    a, b, c, d = (LETTERS[value] for value in values)
    pairs = a + b, c + d
    facts = " ".join(f"{name}={value}" for name, value in zip(keys, pairs, strict=True))
    return Question(f"{facts} ?{keys[requested]}", f"{pairs[requested]}\n")
