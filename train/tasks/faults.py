"""Faults of what a task returns, for the errors: without any this is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lib.config import Config
from lib.errors import ConfigError
from lib.plugins import TASKS
from lib.runs.metrics import RESERVED, RESERVED_SUMS


def sums_error(sums: Any, config: Config, targets: int | None, *, are_sums: bool) -> ConfigError:
    """Return the error for `sums` of a micro-batch that `check_sums` refuses."""
    function = "evaluation" if targets is None else "training"
    place = f"{TASKS.place(config.task)}/task.py"
    if not are_sums:
        kind = "Tensor" if isinstance(sums, Tensor) else type(sums).__name__  # a traced one is another
        todo = "return Sums(loss, count, metrics)"
        return ConfigError(f"{place}: {function} returns {kind}, not Sums", todo=todo)
    if not isinstance(sums.loss, Tensor) or sums.loss.dim():
        shape = tuple(sums.loss.shape) if isinstance(sums.loss, Tensor) else type(sums.loss).__name__
        return ConfigError(f"{place}: the loss is {shape}, not a sum", todo="sum it over the samples")
    if targets is not None and not sums.loss.requires_grad:
        why = "it was detached, or does not depend on the outputs"
        return ConfigError(f"{place}: the loss has no gradient", why=why)
    metrics = sums.metrics
    odd = [*map(_kind, metrics.values() if isinstance(metrics, Mapping) else [metrics])]
    odd = [kind for kind in odd if kind != "Tensor" or not isinstance(metrics, Mapping)]
    if odd:
        todo = 'return a dict of sums, such as {"accuracy": number_right}'
        return ConfigError(f"{place}: {function} returns metrics of {odd[0]}", todo=todo)
    if named := RESERVED_SUMS & metrics.keys():
        return _reserved(place, function, named)
    return _count_error(sums.count, place, targets)


def _count_error(count: Any, place: str, targets: int | None) -> ConfigError:
    by_count = "return count_of(batch), or a sum of batch.weights"
    if isinstance(count, Tensor) or not isinstance(count, int):
        shape = tuple(count.shape) if isinstance(count, Tensor) else type(count).__name__
        return ConfigError(f"{place}: the count is {shape}, not a number of targets", todo=by_count)
    if targets is None:
        why = "the rows of padding count, too, and their number depends on the micro-batch"
        return ConfigError(f"{place}: evaluation counts {count} targets by an int", why=why, todo=by_count)
    return ConfigError(
        f"{place}: training counts {count} targets of a micro-batch that has {targets}",
        why="where the count is an int, gradients are divided by targets_per_sample for each sample",
        todo="set targets_per_sample, or return the count as a tensor",
    )


def figures_error(figures: Any, config: Config, function: str) -> ConfigError:
    """Return the error for what `function` of a task returns in place of a dict of numbers."""
    place = f"{TASKS.place(config.task)}/task.py"
    values = figures.values() if isinstance(figures, dict) else [figures]
    odd = [type(each).__name__ for each in values if not isinstance(each, int | float)]
    if odd or not isinstance(figures, dict):
        found = (*odd, "a number")[0]
        return ConfigError(f"{place}: {function} returns {found}, not a dict of numbers")
    if named := RESERVED & figures.keys():
        return _reserved(place, function, named)
    first = next((f"{name} {value:g}" for name, value in figures.items()), "nothing")
    todo = 'begin with the count, named by its unit: {"samples": means["count"], ...}'
    return ConfigError(f"{place}: {function} returns {first} in place of a count", todo=todo)


def missing_error(name: str, figures: Mapping[str, float], config: Config) -> ConfigError:
    """Return the error for a figure that is asked for and that the task does not report."""
    by = "CONFIG_BEST_METRIC names" if config.evaluation.best_metric else "its score needs"
    what = f"{TASKS.place(config.task)}/task.py: report returns no {name}, which {by}"
    return ConfigError(what, why=f"it returns {', '.join(figures)}")


def _reserved(place: str, function: str, names: frozenset[str]) -> ConfigError:
    name = min(names)
    what = f"{place}: {function} returns a metric {name}"
    return ConfigError(what, why="every run has a value of this name", todo="give it another name")


def _kind(value: Any) -> str:
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__
