"""Search for the best point of an experiment with Optuna.

One point is trained at a time, its seeds side by side, so that proposals depend on results and not on which
run ended first. A search that is started again proposes the same points, finds their results, and continues.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.errors import ConfigError
from lib.sweeps.experiment import Axis, Experiment, Range, Search, Setting, raw
from lib.sweeps.result_table import check_reported, mean_of
from lib.sweeps.runner import Result, Run, resolved_runs


def run_search(
    experiment: Experiment,
    *,
    root: Path,
    train: Callable[..., list[Result]],
    begin: Callable[[Sequence[Run]], None],
) -> tuple[Experiment, list[Result]]:
    """Return the experiment with the points that were tried, and the results of their runs.

    train: called with the runs of a point, and as `later` the number of runs that may follow.
    begin: called with runs at the ends of all axes before the first run is trained.

    Raises ConfigError where Optuna is missing, and before the first run where an end of an axis is not valid.
    """
    search = experiment.search
    assert search is not None, f"{experiment.name} has no search space"
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=search.draw_seed)
    study = optuna.create_study(direction="maximize" if search.maximize else "minimize", sampler=sampler)
    begin(resolved_runs(_at_the_ends(experiment, search), root=root))
    points: list[Setting] = []
    results: list[Result] = []
    for number in range(search.samples):
        trial = study.ask()
        point = {name: raw(_proposed(trial, name, axis)) for name, axis in search.axes.items()}
        if point not in points:
            points.append(point)
            runs = resolved_runs(replace(experiment, points=(point,)), root=root)
            later = (search.samples - number - 1) * len(runs)
            results += train([replace(run, number=len(points) - 1) for run in runs], later=later)
        if len(points) > 1 or number + 1 == search.samples:  # that of one may be missing as not finite
            check_reported(results, search.figure)
        figure = mean_of(points.index(point), results, search.figure)
        if figure is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, figure)
    return replace(experiment, points=tuple(points)), results


def _at_the_ends(experiment: Experiment, search: Search) -> Experiment:
    """Return one seed of points that cover every value of each list and both ends of each range."""
    axes = search.axes.items()
    ends = {name: (axis.low, axis.high) if isinstance(axis, Range) else axis for name, axis in axes}
    points = (
        {name: raw(values[min(number, len(values) - 1)]) for name, values in ends.items()}
        for number in range(max(map(len, ends.values())))
    )
    return replace(experiment, points=tuple(points), seeds=experiment.seeds[:1])


def _proposed(trial: Any, name: str, axis: Axis) -> Any:
    if not isinstance(axis, Range):
        return axis[trial.suggest_categorical(name, range(len(axis)))]
    if axis.is_whole:
        return trial.suggest_int(name, axis.low, axis.high, step=axis.step or 1, log=axis.log)
    proposed = trial.suggest_float(name, axis.low, axis.high, step=axis.step, log=axis.log)
    return float(f"{proposed:.6g}")  # more digits would only make names longer


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            "the package optuna is not installed",
            why=f"sweep: optuna needs it ({error})",
            todo="install the extra optuna, for example with .venv/bin/pip install optuna",
        ) from error
