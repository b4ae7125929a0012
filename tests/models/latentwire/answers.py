"""Questions and frozen language models for tests: few, small, and with random weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lib.config import Config
from lib.data.datasets.key_values import Question, questions
from lib.data.datasets.question_answering.data import ANCHOR, Options, packed
from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.data.types import Dataset
from tests.support.configs import changed
from tests.support.simulated import make_training_data
from tests.support.training import small_config
from train.tasks.bridge.frozen import FrozenPair, FrozenSource
from train.training_data import TrainingData, with_prepared

SOURCE_BYTES = 16


@cache
def some_questions(count: int) -> tuple[Question, ...]:
    return tuple(questions("train")[:count])


def answer_set(train: int, test: int) -> Dataset:
    options = Options(
        frozen_model_a="toolkit:bytes", frozen_model_b="toolkit:pairs", source_bytes=SOURCE_BYTES
    )
    rows = some_questions(train + test)
    return packed(
        "key_values",
        rows[:train],
        rows[train:],
        options,
        root=Path("nowhere"),
        anchor=ANCHOR,
        source="some",
        synthetic=True,
    )


def answers_data(config: Config, *, train: int = 48, test: int = 10) -> TrainingData:
    """The frozen models have random weights."""
    dataset = answer_set(train, test)
    assert isinstance(dataset.spec, AnswerSpec)
    first, second = (FrozenSource(side, None) for side in dataset.spec.sides)
    return with_prepared(config, make_training_data(config, dataset), FrozenPair((first, second)))


def small_bridge_config(**changes: object) -> Config:
    """Three steps of a network of 8 channels and 3 latents, with SGD."""
    options = {"latents": 3, "width": 8, "layers": 1, "heads": 2}
    return changed(small_config("latentwire"), **{"model_options": options} | changes)
