"""Training data for a model that was simulated before: that takes most of the time of making them."""

from __future__ import annotations

import dataclasses
from typing import Any

from lib.config import Config
from lib.data.types import Dataset
from lib.nn.model_code import load_model
from lib.plan.types import ModelFacts
from train import training_data
from train.training_data import TrainingData

# Settings that no model is built by.
OF_TRAINING = {
    "optim",
    "lr_schedule",
    "optimizer",
    "adam_8bit",
    "budget",
    "num_epochs",
    "max_steps",
    "max_seconds",
    "eval_interval_steps",
    "evaluation",
    "log_interval_steps",
    "log_seconds",
    "checkpoints",
    "sinks",
    "resume",
    "data_placement",
    "num_workers",
    "prefetch",
}
_KNOWN: dict[tuple[object, ...], tuple[ModelFacts, list[object]]] = {}


def make_training_data(config: Config, dataset: Dataset) -> TrainingData:
    """As `train.training_data.make_training_data`, but what was found for the same model is used again.

    A test that replaces a part of that module, or of the model's, has it simulated anew.
    """
    fields = {name: value for name, value in vars_of(config).items() if name not in OF_TRAINING}
    code = [*vars(training_data).values(), *vars(load_model(config.model)).values()]
    key = (repr(fields), repr(dataset.spec), *map(id, code))
    if key not in _KNOWN:
        data = training_data.make_training_data(config, dataset)
        _KNOWN[key] = data.facts, code  # which keeps what has these numbers
        return data
    training_data.check_task(config, dataset)
    facts, _ = _KNOWN[key]
    return TrainingData(dataset=dataset, facts=dataclasses.replace(facts, train_size=dataset.train.size))


def vars_of(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
