"""Random rows of tables, and texts with tags, in memory: for tasks that no shipped configuration chooses."""

from __future__ import annotations

import numpy as np

from lib.config import Config
from lib.data.types import ArrayPart, Column, Dataset, TableLabelsSpec, TableSpec, TokenTagSpec
from lib.nn import IGNORED
from tests.support.simulated import make_training_data
from tests.support.tokens import BLOCK, VOCAB
from train.training_data import TrainingData

TAGS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
WIDTH = 5


def random_table(config: Config, *, train: int, test: int) -> TrainingData:
    """Rows of numbers, with two numbers to predict or three labels each, as the task of `config` wants."""
    random, columns = np.random.default_rng(0), tuple(Column(name=f"x{place}") for place in range(WIDTH))

    def part(size: int) -> ArrayPart:
        inputs = random.standard_normal((size, WIDTH)).astype(np.float32)
        if config.task == "multilabel":
            return ArrayPart(inputs, (random.random((size, 3)) < (0.2, 0.5, 0.7)).astype(np.float32))
        return ArrayPart(inputs, random.standard_normal((size, 2)).astype(np.float32))

    targets = (Column(name="a", mean=3.0, std=2.0), Column(name="b"))
    spec = (
        TableLabelsSpec(name="random", columns=columns, classes=3)
        if config.task == "multilabel"
        else TableSpec(name="random", columns=columns, targets=targets)
    )
    return make_training_data(config, Dataset(spec, part(train), part(test), "random"))


def random_tags(config: Config, *, train: int, test: int) -> TrainingData:
    """Texts of all lengths, most tokens of which end a word."""
    random, pad = np.random.default_rng(0), VOCAB - 1

    def part(size: int) -> ArrayPart:
        tokens = random.integers(0, pad, (size, BLOCK))
        tags = random.integers(0, len(TAGS), (size, BLOCK))
        ends = random.random((size, BLOCK)) < 0.7
        ends[:, 0] = True
        beyond = np.arange(BLOCK) > random.integers(1, BLOCK, (size, 1))
        tokens[beyond] = pad
        tokens[:, 0], tokens[:, 1] = np.arange(size) % pad, np.arange(size) // pad  # tell rows apart
        return ArrayPart(tokens, np.where(ends & ~beyond, tags, IGNORED).astype(np.int32))

    spec = TokenTagSpec(name="tags", vocab_size=VOCAB, block_size=BLOCK, tags=TAGS, pad=pad)
    return make_training_data(config, Dataset(spec, part(train), part(test), "random"))
