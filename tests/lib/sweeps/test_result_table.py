"""Points of a sweep: the best, differences from the first with Holm's correction, and main effects."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.sweeps.experiment import Experiment, read_experiment
from lib.sweeps.result_table import best_of, check_same_data, main_effects, objective, table
from lib.sweeps.runner import Result

GRID = "axes: {LEARNING_RATE: [0.1, 0.2], EMA: [true, false]}\nseeds: 3\n"


def study(folder: Path, text: str = GRID) -> Experiment:
    (folder / "study.yaml").write_text(f"config: lenet5\n{text}")
    return read_experiment(folder / "study.yaml")


def results_of(experiment: Experiment, means: list[float], *, metric: str = "accuracy") -> list[Result]:
    """A point's mean, 0.01 more for each seed, and a spread of its own that is no multiple of that."""
    return [
        Result(
            number=number,
            identity="",
            settings={**experiment.points[number], "SEED": str(seed)},
            metrics={metric: mean + 0.01 * seed + 0.0001 * (number * seed % 3)},
            reason="",
        )
        for number, mean in enumerate(means)
        for seed in experiment.seeds
    ]


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 3), ("loss", 0)])
def test_the_best_point_has_the_best_mean(tmp_path: Path, metric: str, best: int) -> None:
    experiment = study(tmp_path)
    results = results_of(experiment, [0.1, 0.3, 0.2, 0.4], metric=metric)
    assert objective(experiment, results) == (metric, metric == "accuracy")
    assert best_of(experiment, results) == (best, 4)


def test_a_point_with_a_failed_run_is_not_the_best(tmp_path: Path) -> None:
    experiment = study(tmp_path)
    results = results_of(experiment, [0.1, 0.3, 0.2, 0.4])
    results[-1] = Result(number=3, identity="", settings=results[-1].settings, metrics={}, reason="it broke")
    assert best_of(experiment, results) == (1, 3)
    assert best_of(experiment, []) == (0, 0)
    del next(result for result in results if result.number == 1).metrics["accuracy"]  # it was not finite
    assert best_of(experiment, results) == (2, 2) and len(table(experiment, results)) == 5


def test_differences_from_the_first_are_paired_and_corrected_for_their_number(tmp_path: Path) -> None:
    experiment = study(tmp_path)
    results = results_of(experiment, [0.1, 0.3, 0.1, 0.4])
    lines = table(experiment, results, note="best of 4, not confirmed")
    assert "accuracy - first" in lines[0] and "(p" not in lines[1]
    assert "+0.2001 (p 2.5e-07)" in lines[2], "three times the p value of three pairs alone"
    assert "+0.0001 (p 0.45)" in lines[3], "twice its own: the smallest counts three times"
    assert [line.endswith("best of 4, not confirmed") for line in lines] == [False] * 4 + [True]
    only = [result for result in results if result.settings["SEED"] == "1"]
    assert "first" not in table(experiment, only)[0], "one seed has no spread"


def test_points_that_are_evaluated_on_different_data_are_noted(tmp_path: Path) -> None:
    experiment = study(tmp_path, "axes: {HOLDOUT: [0, 500]}\nseeds: 2\n")
    results = results_of(experiment, [0.1, 0.3])
    for result in results:
        seed = int(result.settings["SEED"])  # generated data may have other counts with each seed
        result.metrics.update(tokens=100.0 * seed + result.number, bits_per_byte=1.0)
    note = table(experiment, results)[-1]
    assert note == "note: evaluated on different data, which cannot be compared: 100 tokens and 101 tokens"
    with pytest.raises(ConfigError, match="accuracy on different data cannot be compared"):
        check_same_data(results, "accuracy")
    check_same_data(results, "bits_per_byte")
    del results[0].metrics["tokens"], results[1].metrics["tokens"]
    assert len(table(experiment, results)) == 3, "it is not known of each"


def test_the_metric_is_the_best_metric_of_the_runs(tmp_path: Path) -> None:
    experiment = dataclasses.replace(study(tmp_path), best_metric="macro_f1")
    results = results_of(experiment, [0.1, 0.3, 0.2, 0.4])
    assert objective(experiment, results) == ("accuracy", True), "none reports it"
    for result in results:
        result.metrics["macro_f1"] = 1 - result.metrics["accuracy"]
    assert objective(experiment, results) == ("macro_f1", True) and best_of(experiment, results) == (0, 4)


def test_main_effects_count_each_seed_once(tmp_path: Path) -> None:
    experiment = study(tmp_path)
    effects = main_effects(experiment, results_of(experiment, [0.1, 0.3, 0.2, 0.4]))
    assert list(effects) == ["LEARNING_RATE", "EMA"] and list(effects["EMA"]) == ["y", "n"]
    assert effects["LEARNING_RATE"]["0.1"][0] == pytest.approx(0.2 + 0.02, abs=1e-3)
    assert effects["EMA"]["n"][0] == pytest.approx(0.35 + 0.02, abs=1e-3)
    assert effects["EMA"]["n"][1] == pytest.approx(0.01 / 3**0.5, rel=0.05), "not that of six runs"
    (value,) = main_effects(experiment, results_of(experiment, [0.1])[:1])["EMA"].values()
    assert value[1] == 0.0
