"""Small texts in memory for tests of language models: tokens whose successor follows from them."""

from __future__ import annotations

import numpy as np
import torch

from lib.config import Config
from lib.data.types import ArrayPart, Dataset, TextClassSpec, TextSpec, TokenPart
from tests.support.simulated import make_training_data
from tests.support.training import small_config
from train.training_data import TrainingData

VOCAB = 16
BLOCK = 8


def successor(token: int) -> int:
    """The next token of the cycle through all of them."""
    return (5 * token + 3) % VOCAB


def cycle(length: int, *, first: int = 0) -> np.ndarray:
    tokens = [first]
    while len(tokens) < length:
        tokens.append(successor(tokens[-1]))
    return np.array(tokens, np.uint8)


def text_spec(*, vocab_size: int = VOCAB, block_size: int = BLOCK, tokens: int = 0) -> TextSpec:
    return TextSpec(
        name="cycle",
        vocab_size=vocab_size,
        block_size=block_size,
        unit="byte",
        validation_tokens=tokens,
        validation_bytes=tokens,
    )


def small_lm_config(**changes: object) -> Config:
    config = small_config("gpt2")
    options = {**config.model_options, "layers": 2, "heads": 2, "width": 16}
    return config.replace(**{"model_options": options, "augment": "none"} | changes)


def text_data(
    config: Config, *, train: np.ndarray | None = None, test: np.ndarray | None = None
) -> TrainingData:
    """The cycle, or noise where tokens are given; the last window of the evaluation part is ragged."""
    train = cycle(40 * BLOCK) if train is None else train
    test = cycle(3 * BLOCK + 4) if test is None else test
    dataset = Dataset(
        spec=text_spec(tokens=len(test) - 1),
        train=TokenPart(train, block_size=BLOCK, shifted=True),
        test=TokenPart(test, block_size=BLOCK),
        source="a cycle",
    )
    return make_training_data(config, dataset)


def sentences_data(config: Config, *, size: int) -> TrainingData:
    """Random tokens of every length, with the label that the first one has."""
    random, pad = np.random.default_rng(0), VOCAB - 1
    tokens = random.integers(0, pad, (size, BLOCK))
    tokens[np.arange(BLOCK) > random.integers(0, BLOCK, (size, 1))] = pad
    part = ArrayPart(tokens, tokens[:, 0] % 2)
    spec = TextClassSpec(name="noise", vocab_size=VOCAB, block_size=BLOCK, classes=2, pad=pad)
    return make_training_data(config, Dataset(spec=spec, train=part, test=part, source="noise"))


def oracle(tokens_BT: torch.Tensor) -> torch.Tensor:
    """Logits that are certain of the successor of each token."""
    following = (5 * tokens_BT + 3) % VOCAB
    return 50.0 * torch.nn.functional.one_hot(following, VOCAB).double()
