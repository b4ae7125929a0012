"""The loss of a model that has learned nothing, as its task tells it."""

from __future__ import annotations

from typing import Any, cast

from lib.config import Config
from lib.data.types import Spec
from train.tasks.base import load_task, optional_function


def naive_loss_of(config: Config, spec: Spec) -> float | None:
    """Return the expected loss of an untrained model; None if its task cannot tell."""
    naive_loss = optional_function(config, "naive_loss")
    return None if naive_loss is None or borrows_naive_loss(config) else naive_loss(spec)


def borrows_naive_loss(config: Config) -> bool:
    """Return True for a task with `naive_loss` of another one, whose loss may be another: zeros tell it."""
    naive_loss = optional_function(config, "naive_loss")
    return naive_loss is not None and naive_loss.__module__ != cast(Any, load_task(config)).__name__
