"""Tasks as plug-ins: loaded by model, and their optional functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from lib.config import Config
from lib.data.types import Dataset, Spec
from lib.errors import ConfigError
from lib.nn.model_code import load_model
from lib.plugins import TASKS
from train.tasks.base import Baseline, Prepare, Task, TaskModule


def load_task(model: str) -> TaskModule:
    """Load the task module of `model`. Raises ConfigError if one of the two is invalid."""
    return cast(TaskModule, TASKS.load(load_model(model).TASK))


def make_task(config: Config, spec: Spec, *, prepared: Any = None) -> Task:
    """Build the configured task. prepared: from `Prepared.load`, for a task with a preparation."""
    module = load_task(config.model)
    options = TASKS.options(load_model(config.model).TASK, config.task_options)
    given = {} if preparation_of(config.model) is None else {"prepared": prepared}
    return module.build(options, spec, config=config, **given)


def preparation_of(model: str) -> Prepare | None:
    """Return the preparation of the task of `model`, None if it has none."""
    return cast("Prepare | None", vars(load_task(model)).get("prepare"))


def to_measure(config: Config) -> Config:
    """Return `config` with the cheapest options of its task that need the same memory."""
    shorten = vars(load_task(config.model)).get("to_measure")
    if shorten is None:
        return config
    return config.replace(task_options=shorten(config.task_options))


def baseline_of(model: str, dataset: Dataset, *, cache_dir: Path, log: Callable[[str], None]) -> str | None:
    """Return the baseline for `model` as a line of text, cached in `cache_dir`; None if there is none.

    Raises ToolkitError if the cache cannot be written.
    """
    baseline = cast("Baseline | None", vars(load_task(model)).get("baseline"))
    return None if baseline is None else baseline(dataset, cache_dir=cache_dir, log=log)


def naive_loss_of(model: str, spec: Spec) -> float | None:
    """Return the expected loss of an untrained `model`; None if its task cannot tell."""
    naive_loss = cast("Callable[[Spec], float] | None", vars(load_task(model)).get("naive_loss"))
    return None if naive_loss is None else naive_loss(spec)


def check_options(config: Config) -> None:
    """Raise ConfigError if a symbol of the task is hidden because the model's Kconfig does not select it."""
    hidden = [name for name, value in config.task_options.items() if value is None]
    if hidden:
        task = load_model(config.model).TASK
        raise ConfigError(
            f'models/{config.model}/model.py: TASK = "{task}" has no CONFIG_{hidden[0].upper()}',
            todo=f"select {vars(load_task(config.model))['SELECTS']} in models/{config.model}/Kconfig",
        )
