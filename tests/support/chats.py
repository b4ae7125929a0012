"""Random conversations in memory: rows of very uneven lengths, of which very uneven shares count."""

from __future__ import annotations

import numpy as np

from lib.config import Config
from lib.data.datasets.chat.data import as_rows
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.chat.templates import Sample
from lib.data.types import ArrayPart, Dataset
from tests.support.simulated import make_training_data
from tests.support.tokens import BLOCK, VOCAB
from train.training_data import TrainingData

PAD = VOCAB - 1


def chat_spec(*, packed: bool = False, bucketed: bool = False) -> ChatSpec:
    kinds = {"packed": packed, "bucketed": bucketed}
    return ChatSpec(name="chats", vocab_size=VOCAB, block_size=BLOCK, unit="byte", pad=PAD, end=PAD, **kinds)


def random_samples(size: int, *, seed: int = 0) -> list[Sample]:
    """Samples that their first two tokens tell apart."""
    random, samples = np.random.default_rng(seed), list[Sample]()
    for number in range(size):
        ids = [
            number % PAD,
            number // PAD % PAD,
            *random.integers(0, PAD, random.integers(0, BLOCK - 1)).tolist(),
        ]
        counts = (random.random(len(ids)) < random.choice([0.1, 0.9])).tolist()
        samples.append(Sample(f"here:{number}", ids, [False, True, *counts[2:]]))
    return samples


def random_chats(
    config: Config, *, train: int, test: int, packed: bool = False, bucketed: bool = False
) -> TrainingData:
    spec = chat_spec(packed=packed, bucketed=bucketed)

    def part(size: int, seed: int) -> ArrayPart:
        rows = as_rows(random_samples(4 * size if packed else size, seed=seed), spec)
        return ArrayPart(rows.inputs[:size], rows.targets[:size])

    return make_training_data(config, Dataset(spec, part(train, 0), part(test, 1), "random"))
