"""What is measured: models at the sizes that people train them at, on random data of the right shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from lib.data import ArrayPart, Dataset, ImageSpec, TextSpec, TokenPart

ROWS = 256  # samples of a training part; longer runs go through it several times
TEST_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model by its symbols, its data, and the steps in which a micro-batch of it can change."""

    settings: Mapping[str, str]
    dataset: Callable[[], Dataset]
    step: int  # NORM_BATCH where there is batch normalisation
    lacks: tuple[str, ...] = ()  # symbols that every other case has


def random_images(size: int, *, channels: int, classes: int) -> Dataset:
    random = np.random.default_rng(0)

    def part(rows: int) -> ArrayPart:
        images = random.integers(0, 256, (rows, channels, size, size), dtype=np.uint8)
        return ArrayPart(images, random.integers(0, classes, rows, dtype=np.int64))

    spec = ImageSpec(
        name="random",
        channels=channels,
        height=size,
        width=size,
        classes=classes,
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        synthetic=True,
    )
    return Dataset(spec=spec, train=part(ROWS), test=part(TEST_ROWS), source="random images")


def random_text(block_size: int, *, vocab_size: int) -> Dataset:
    random = np.random.default_rng(0)

    def part(rows: int, *, shifted: bool) -> TokenPart:
        tokens = random.integers(0, vocab_size, (rows + 1) * block_size + 1, dtype=np.uint16)
        return TokenPart(tokens, block_size, shifted=shifted)

    test = part(TEST_ROWS // 16, shifted=False)
    spec = TextSpec(
        name="random",
        vocab_size=vocab_size,
        block_size=block_size,
        unit="token",
        validation_tokens=len(test.tokens) - 1,
        validation_bytes=None,
        synthetic=True,
    )
    return Dataset(spec=spec, train=part(ROWS, shifted=True), test=test, source="random tokens")


CASES: Mapping[str, Case] = {
    "lenet5": Case(
        settings={"CONFIG_MODEL_LENET5": "y"},
        dataset=partial(random_images, 28, channels=1, classes=10),
        step=1,
    ),
    "resnet18": Case(
        settings={"CONFIG_MODEL_RESNET18": "y"},
        dataset=partial(random_images, 32, channels=3, classes=10),
        step=32,
    ),
    "resnet50": Case(
        settings={"CONFIG_MODEL_RESNET50": "y", "CONFIG_RESNET50_STEM_IMAGENET": "y"},
        dataset=partial(random_images, 224, channels=3, classes=1000),
        step=32,
    ),
    "gpt2": Case(
        settings={"CONFIG_MODEL_GPT2": "y", "CONFIG_GPT2_PAD_VOCAB": "128"},
        dataset=partial(random_text, 1024, vocab_size=50257),
        step=1,
        lacks=("CONFIG_AUGMENT_NONE",),
    ),
}
