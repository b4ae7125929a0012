"""The kind of learning that a model names: found, checked and built."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from lib.config import Config
from lib.data.types import Spec
from lib.errors import ConfigError
from lib.nn.model_code import load_model
from lib.plugins import TASKS
from train.tasks.base import Prepare, Task, TaskModule


def load_task(model: str) -> TaskModule:
    """The module of the task that `model` names. Raises ConfigError where one of the two is wrong."""
    return cast(TaskModule, TASKS.load(load_model(model).TASK))


def make_task(config: Config, spec: Spec, *, prepared: Any = None) -> Task:
    """The configured task for such data.

    prepared: what `Prepared.load` gave, for a task that has something made before.
    """
    module = load_task(config.model)
    options = TASKS.options(load_model(config.model).TASK, config.task_options)
    given = {} if preparation_of(config.model) is None else {"prepared": prepared}
    return module.build(options, spec, config=config, **given)


def preparation_of(model: str) -> Prepare | None:
    """What has to be called before a job of `model` is made; None where its task has nothing to prepare."""
    return cast("Prepare | None", vars(load_task(model)).get("prepare"))


def to_measure(config: Config) -> Config:
    """`config` with the cheapest options of its task that take as much memory."""
    shorten = vars(load_task(config.model)).get("to_measure")
    if shorten is None:
        return config
    return dataclasses.replace(config, task_options=shorten(config.task_options))


def check_options(config: Config) -> None:
    """Raise ConfigError where a symbol of the task is hidden: the model's Kconfig does not select it."""
    hidden = [name for name, value in config.task_options.items() if value is None]
    if hidden:
        task = load_model(config.model).TASK
        raise ConfigError(
            f'models/{config.model}/model.py: TASK = "{task}" has no CONFIG_{hidden[0].upper()}',
            todo=f"select {vars(load_task(config.model))['SELECTS']} in models/{config.model}/Kconfig",
        )
