"""Answers of a task: what `make predict` writes and an exported graph returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from torch import Tensor

from lib.config import Config
from lib.errors import ConfigError
from lib.plugins import TASKS
from train.tasks.base import Columns, load_task


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of a task from what its model returns: two functions that its task.py may define.

    postprocess: (outputs (N, ...), spec) -> tensor (N, ...) of probabilities, or of numbers in units. Part of
                 an exported graph.
    predictions: (spec; keywords class_names and top) -> function of such an array to columns (N,) by name.
                 top: keep this many classes, 0 for all. Raises ConfigError if there are none of such data.
    """

    postprocess: Callable[[Tensor, Any], Tensor]
    predictions: Callable[..., Callable[[npt.NDArray[Any]], Columns]]


def answers_of(config: Config) -> Answers:
    """Return what the configured task defines. Raises ConfigError if it does not."""
    postprocess, predictions = map(vars(load_task(config)).get, ("postprocess", "predictions"))
    if postprocess is None or predictions is None:
        raise ConfigError(
            f"the task {config.task} of {config.model} has no predictions to write down",
            why=f"{TASKS.place(config.task)}/task.py does not define postprocess and predictions",
            todo="make eval and make report show what it does",
        )
    return Answers(postprocess, predictions)
