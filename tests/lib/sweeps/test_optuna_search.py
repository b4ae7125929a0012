"""Searches: search spaces, the calls to Optuna, and that nothing is trained twice."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ConfigError
from lib.sweeps.experiment import Experiment, read_experiment
from lib.sweeps.optuna_search import run_search
from lib.sweeps.result_table import best_of, table
from lib.sweeps.runner import Result, Run

ROOT = Path(__file__).resolve().parents[3]
AXES = "axes: {LEARNING_RATE: {low: 1e-3, high: 1.0, log: true}, MAX_STEPS: {low: 2, high: 8, step: 2}"
SEARCH = "sweep: optuna\nsamples: 12\nminimize: loss\nseeds: 2\n"


def study(folder: Path, text: str) -> Experiment:
    file = folder / "study.yaml"
    file.write_text(f"config: lenet5\nset: {{BUDGET_STEPS: true}}\n{text}\n")
    return read_experiment(file)


class StepSettings:
    """Draws at random from what Optuna's would draw from."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None, log: bool) -> float:
        assert name == "LEARNING_RATE" and log and step is None
        return float(low * (high / low) ** self._draw.random())

    def suggest_int(self, name: str, low: int, high: int, *, step: int, log: bool) -> int:
        assert name == "MAX_STEPS" and not log
        return self._draw.randrange(low, high + 1, step)

    def suggest_categorical(self, name: str, choices: Sequence[int]) -> int:
        assert name == "EMA"
        return self._draw.choice(choices)


class Study:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.values: list[float | str] = []

    def ask(self) -> StepSettings:
        return StepSettings(self._draw)

    def tell(self, trial: StepSettings, value: float | None = None, *, state: str = "") -> None:
        assert isinstance(trial, StepSettings)
        self.values.append(state if value is None else value)


@pytest.fixture
def studies(monkeypatch: pytest.MonkeyPatch) -> list[Study]:
    """Those that were made of the stand-in for Optuna."""
    made: list[Study] = []

    def create_study(*, direction: str, sampler: int) -> Study:
        assert direction in ("minimize", "maximize")
        made.append(Study(sampler))
        return made[-1]

    package: Any = types.ModuleType("optuna")
    package.create_study = create_study
    package.samplers = types.SimpleNamespace(TPESampler=lambda seed: seed)
    package.trial = types.SimpleNamespace(TrialState=types.SimpleNamespace(FAIL="failed"))
    package.logging = types.SimpleNamespace(WARNING=30, set_verbosity=lambda _: None)
    monkeypatch.setitem(sys.modules, "optuna", package)
    return made


def trained(
    runs: Sequence[Run], *, kept: list[Run], figure: str = "loss", later: int, left: list[int] | None = None
) -> list[Result]:
    """Loss is lowest at a learning rate of 0.03, and a seed adds a little; six steps fail."""
    kept += runs
    if left is not None:
        left.append(later)
    results = []
    for run in runs:
        rate = float(run.settings["LEARNING_RATE"])
        loss = abs(rate - 0.03) + 0.01 * int(run.settings["SEED"])
        fails = run.settings.get("MAX_STEPS") == "6"
        results.append(
            Result(
                number=run.number,
                identity=run.identity,
                settings=run.settings,
                metrics={} if fails else {figure: loss},
                reason="it broke" if fails else "",
                seconds_cpu=1.0,
                peak_memory_mb=1.0,
            )
        )
    return results


def ends(runs: Sequence[Run]) -> None:
    """What a sweep is given before its first run: one for each value of the longest axis, of one seed."""
    assert len(runs) == 2 and len({run.settings["SEED"] for run in runs}) == 1


@pytest.mark.slow
def test_all_seeds_of_a_point_are_trained_and_optuna_gets_their_mean(
    tmp_path: Path, studies: list[Study]
) -> None:
    kept, left = list[Run](), list[int]()
    requested = study(tmp_path, SEARCH + AXES + ", EMA: [true, false]}")
    done, results = run_search(requested, root=ROOT, begin=ends, train=partial(trained, kept=kept, left=left))
    assert left[:2] == [22, 20] and left[-1] == 0
    assert len(done.points) == 12 and len(kept) == len(results) == 24
    assert [run.number for run in kept] == [number for number in range(12) for _ in range(2)]
    assert {run.settings["MAX_STEPS"] for run in kept} == {"2", "4", "6", "8"}
    assert {run.settings["EMA"] for run in kept} == {"y", "n"}
    (own,) = studies
    expected = [
        "failed" if point["MAX_STEPS"] == "6" else abs(float(point["LEARNING_RATE"]) - 0.03) + 0.015
        for point in done.points
    ]
    for found, wanted in zip(own.values, expected, strict=True):
        assert found == (wanted if wanted == "failed" else pytest.approx(wanted))
    assert all(len(point["LEARNING_RATE"].lstrip("0.")) <= 6 for point in done.points)
    known = [(value, number) for number, value in enumerate(expected) if value != "failed"]
    assert best_of(done, results) == (min(known)[1], len(known))  # type: ignore[type-var]
    assert len(table(done, results)) == 13
    again, _ = run_search(requested, root=ROOT, begin=ends, train=partial(trained, kept=[]))
    assert again.points == done.points, "what is started again proposes the same"


def test_the_best_may_be_the_most_and_a_point_is_trained_once(tmp_path: Path, studies: list[Study]) -> None:
    kept: list[Run] = []
    text = "sweep: optuna\nsamples: 6\nmaximize: loss\nseeds: [7]\nset: {LEARNING_RATE: 0.1}\n"
    file = tmp_path / "study.yaml"
    file.write_text(f"config: lenet5\n{text}axes: {{EMA: [true, false]}}\n")
    done, results = run_search(
        read_experiment(file), root=ROOT, begin=ends, train=partial(trained, kept=kept)
    )
    assert len(kept) == len(done.points) == 2 and len(studies[0].values) == 6
    results[1].metrics["loss"] = 5.0
    assert best_of(done, results) == (1, 2)


def test_faults_are_reported_before_the_first_run(tmp_path: Path, studies: list[Study]) -> None:
    kept: list[Run] = []
    requested = study(tmp_path, SEARCH + "axes: {LEARNING_RATE: {low: -1.0, high: 1.0}}")
    with pytest.raises(ConfigError, match="cannot be configured") as error:
        run_search(requested, root=ROOT, begin=ends, train=partial(trained, kept=kept))
    assert "LEARNING_RATE" in error.value.findings[0] and not kept
    requested = study(tmp_path, SEARCH + AXES + "}")
    named_otherwise = partial(trained, kept=kept, figure="accuracy")
    with pytest.raises(ConfigError, match="no evaluation reports loss; search by one of accuracy"):
        run_search(requested, root=ROOT, begin=ends, train=named_otherwise)
    assert len(kept) <= 4 and studies


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"the package optuna is not installed.*install the extra optuna"):
        run_search(study(tmp_path, SEARCH + AXES + "}"), root=ROOT, begin=ends, train=list)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sweep: optuna\nminimize: loss\naxes: {EMA: [true]}", "needs samples"),
        ("sweep: optuna\nsamples: 0\nminimize: loss\naxes: {EMA: [true]}", "needs samples"),
        ("sweep: optuna\nsamples: 3\naxes: {EMA: [true]}", "needs minimize: FIGURE or maximize"),
        (f"{SEARCH}maximize: loss\naxes: {{EMA: [true]}}", "needs minimize: FIGURE or maximize"),
        (f"{SEARCH}", "needs axes"),
        (f"{SEARCH}axes: {{EMA: []}}", "EMA offers no choice"),
        (f"{SEARCH}axes: {{EMA: {{low: 1, height: 2}}}}", "EMA offers no choice"),
        (f"{SEARCH}axes: {{NUM_EPOCHS: {{low: 2, high: 1}}}}", "does not go from a number to a larger one"),
        (f"{SEARCH}axes: {{NUM_EPOCHS: {{low: 1, high: 2, log: 10}}}}", "log is not true or false"),
        (f"{SEARCH}axes: {{NUM_EPOCHS: {{low: 1, high: 2, step: -1}}}}", "above 0"),
        (f"{SEARCH}axes: {{NUM_EPOCHS: {{low: 1, high: 4, step: 2, log: true}}}}", "without log"),
        (f"{SEARCH}axes: {{NUM_EPOCHS: {{low: 0, high: 4, log: true}}}}", "more than 0"),
        ("minimize: loss\naxes: {EMA: [true]}", "minimize is for sweep: optuna"),
    ],
)
def test_malformed_searches_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study(tmp_path, text)


def test_optuna_itself_finds_the_lowest_point(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra optuna")
    kept: list[Run] = []
    text = "sweep: optuna\nsamples: 25\nminimize: loss\nseeds: 1\n"
    requested = study(tmp_path, f"{text}{AXES}, EMA: [true, false]}}")
    outcomes = [
        run_search(requested, root=ROOT, begin=ends, train=partial(trained, kept=kept)) for _ in range(2)
    ]
    (done, results), (again, _) = outcomes
    assert done.points == again.points
    best = min(result.metrics["loss"] for result in results if not result.reason)
    assert best < 0.03, "0.01 can be reached"
