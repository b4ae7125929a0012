"""Results of a sweep: the table of its points, the best one, and the effect of each axis."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from lib.errors import ConfigError
from lib.runs.metrics import NOT_METRICS, counts_of, higher_is_better, preferred
from lib.sweeps.experiment import Experiment
from lib.sweeps.runner import Result, format_settings
from lib.sweeps.verdict import holm, p_values
from lib.units import aligned, columns


def objective(experiment: Experiment, results: Sequence[Result]) -> tuple[str, bool]:
    """Return the metric by which points are compared and True if it is maximised; "" without one."""
    if experiment.search is not None:
        return experiment.search.figure, experiment.search.maximize
    names = {name for result in results for name in result.metrics}
    metric = preferred(names, experiment.best_metric)
    return metric, higher_is_better(metric)


def mean_of(number: int, results: Sequence[Result], metric: str) -> float | None:
    """Return the mean of a point over its seeds; None where one failed or was not finite (not stored)."""
    own = [result for result in results if result.number == number]
    if not own or any(result.reason or metric not in result.metrics for result in own):
        return None
    return statistics.fmean(result.metrics[metric] for result in own)


def check_reported(results: Sequence[Result], metric: str) -> None:
    """Raise ConfigError if no run that is done has `metric`."""
    done = [result.metrics for result in results if not result.reason]
    if done and not any(metric in metrics for metrics in done):
        raise ConfigError(f"no evaluation reports {metric}", todo=f"search by one of {', '.join(done[0])}")


def best_of(experiment: Experiment, results: Sequence[Result]) -> tuple[int, int]:
    """Return the number of the best point, and how many points it is the best of."""
    metric, maximize = objective(experiment, results)
    numbers = range(len(experiment.points) if metric else 0)
    own = _by_point(results)
    known = {number: mean for number in numbers if (mean := mean_of(number, own[number], metric)) is not None}
    return (max if maximize else min)(known, key=known.__getitem__, default=0), len(known)


def table(experiment: Experiment, results: Sequence[Result], *, note: str = "") -> list[str]:
    """Format a line per point: mean and standard deviation of each metric over the seeds.

    Points are compared with the first: mean difference, and p value with Holm's correction. note: for the
    line of the best point.
    """
    metrics = dict.fromkeys(name for result in results for name in result.metrics if name not in NOT_METRICS)
    metric, best = objective(experiment, results)[0], best_of(experiment, results)[0]
    differences = _differences_from_first(results, metric)
    rows = [["point", "seeds", *metrics, f"{metric} - first (p by Holm)" if differences else "", ""]]
    own = _by_point(results)
    for number, point in enumerate(experiment.points):
        done = [result for result in own[number] if not result.reason]
        row = [format_settings(point) or "as configured", f"{len(done)}/{len(experiment.seeds)}"]
        row += [_spread([one.metrics[name] for one in done if name in one.metrics]) for name in metrics]
        rows.append([*row, differences.get(number, ""), note if number == best else ""])
    lines = aligned(columns(rows))
    if data := different_data(results, metric):
        lines.append(f"note: evaluated on different data, which cannot be compared: {data}")
    return lines


def different_data(results: Sequence[Result], metric: str) -> str:
    """Return on what runs of one seed were evaluated, where that is known to differ; "" if it does not."""
    found = defaultdict[tuple[str, str], set[str]](set)
    for result in results:
        for kind, data in (("part", result.part), ("counts", counts_of(result.metrics, metric))):
            found[kind, result.settings["SEED"]] |= {data} - {""}
    return next((" and ".join(sorted(data)) for data in found.values() if len(data) > 1), "")


def check_same_data(results: Sequence[Result], metric: str) -> None:
    """Raise ConfigError where `metric` was measured on different data."""
    if data := different_data(results, metric):
        raise ConfigError(f"{metric} on different data cannot be compared", why=f"it is that of {data}")


def _by_point(results: Sequence[Result]) -> defaultdict[int, list[Result]]:
    found = defaultdict[int, list[Result]](list)
    for result in results:
        found[result.number].append(result)
    return found


def _by_seed(results: Sequence[Result], metric: str) -> dict[int, dict[str, float]]:
    """Return point -> seed -> metric of the runs that did not fail."""
    values = defaultdict[int, dict[str, float]](dict)
    for result in results:
        if not result.reason and metric in result.metrics:
            values[result.number][result.settings["SEED"]] = result.metrics[metric]
    return values


def _differences_from_first(results: Sequence[Result], metric: str) -> dict[int, str]:
    """Format the difference of each point from the first over the seeds that both have, if 2 or more."""
    values = _by_seed(results, metric)
    base, found = values.pop(0, {}), dict[int, Any]()
    for number, own in values.items():
        differences = np.array([[own[seed] - base[seed] for seed in base if seed in own]])
        if differences.size > 1:
            found[number] = differences
    adjusted = holm([float(p_values(each)[0]) for each in found.values()])
    cells = zip(found.items(), adjusted, strict=True)
    return {number: f"{each.mean():+.4f} (p {p:.2g})" for (number, each), p in cells}


def main_effects(
    experiment: Experiment, results: Sequence[Result]
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return axis -> value -> mean of the objective over all other axes, and its standard error over seeds.

    Each seed counts once, by its mean over the points with that value. The error of a single seed is 0.
    """
    found = defaultdict[tuple[str, str], dict[str, list[float]]](lambda: defaultdict(list))
    for number, values in _by_seed(results, objective(experiment, results)[0]).items():
        for axis, (seed, value) in itertools.product(experiment.points[number].items(), values.items()):
            found[axis][seed].append(value)
    effects = defaultdict[str, dict[str, tuple[float, float]]](dict)
    for (name, setting), seeds in found.items():
        means = [*map(statistics.fmean, seeds.values())]
        error = statistics.stdev(means) / math.sqrt(len(means)) if means[1:] else 0.0
        effects[name][setting] = statistics.fmean(means), error
    return effects


def _spread(values: Sequence[float]) -> str:
    deviation = f" +- {statistics.stdev(values):.4f}" if values[1:] else ""
    return f"{statistics.fmean(values):.4f}{deviation}" if values else "-"
