"""make sweep: the best point is judged with fresh seeds before it is called better."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lib import atomic
from lib.errors import ConfigError
from lib.runs.directory import RunDir
from lib.sweeps import paired_comparison
from lib.sweeps.experiment import read_experiment
from lib.sweeps.runner import RESULT, Result, Run, resolved_runs, run_folder
from scripts import sweep

FILE = """
config: lenet5
set: {BUDGET_STEPS: true, MAX_STEPS: 1}
axes: {LEARNING_RATE: [0.1, 0.2, 0.3]}
seeds: 2
"""


def run_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, fresh_gain: float = 0.05, file: str = FILE
) -> None:
    """Train in no time: 0.2 is the best point by 0.05, with fresh seeds by `fresh_gain`; by loss 0.3 is."""

    def train(runs: Sequence[Run], *, out: Path, **_: Any) -> list[Result]:
        results = []
        for run in runs:
            seed, rate = int(run.settings["SEED"]), run.settings["LEARNING_RATE"]
            gain = (fresh_gain if seed > 2 else 0.05) + 0.001 * seed if rate == "0.2" else 0.0
            samples = int(run.settings.get("HOLDOUT", 0)) or 100
            result = Result(
                number=run.number,
                identity=run.identity,
                settings=run.settings,
                metrics={"accuracy": 0.8 + gain, "loss": 1 - float(rate), "samples": samples},
                reason="",
            )
            results.append(result)
            run_folder(run, out).mkdir(parents=True, exist_ok=True)
            atomic.write_text(run_folder(run, out) / RESULT, json.dumps(dataclasses.asdict(result)))
        return results

    (folder / "study.yaml").write_text(file)
    monkeypatch.setattr(sweep.runner, "train_all", train)
    monkeypatch.setattr(paired_comparison, "train_all", train)
    runs = f"--runs={folder / 'runs'}"
    monkeypatch.setattr("sys.argv", ["sweep", str(folder / "study.yaml"), "--jobs=1", runs, *words])
    assert sweep.main() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gain", "word"),
    [pytest.param(0.05, "better", marks=pytest.mark.long), (0.0, "better"), (-0.006, "not shown")],
)
def test_the_best_point_is_judged_with_fresh_seeds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gain: float,
    word: str,
) -> None:
    run_sweep(tmp_path, monkeypatch)
    best = capsys.readouterr().out.splitlines()[-4]
    assert best.startswith("LEARNING_RATE=0.2") and "best of 3, not confirmed" in best
    run_sweep(tmp_path, monkeypatch, "--confirm=5", fresh_gain=gain)
    printed = capsys.readouterr().out
    assert "seeds 3 to 7, judged after 5 pairs" in printed and "2/2" in printed, "of the first stage alone"
    assert f"best of 3; with fresh seeds, against the first: {word}\n" in printed
    run_sweep(tmp_path, monkeypatch)
    assert f"against the first: {word}\n" in capsys.readouterr().out, "it is remembered"
    with pytest.raises(ConfigError, match="compare fresh seeds with FIRST_SEED=8"):
        run_sweep(tmp_path, monkeypatch, "--confirm=3")
    run_sweep(tmp_path, monkeypatch, "--confirm=3", "--first-seed=8", fresh_gain=0.05)
    assert f"against the first: {word}, then better\n" in capsys.readouterr().out
    assert (tmp_path / "runs" / "sweeps" / "study" / "main_effects.png").stat().st_size > 5000


@pytest.mark.slow
def test_points_that_are_evaluated_on_different_data_are_tabulated_but_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FILE.replace("seeds", "sweep: zip\nseeds").replace("0.3]", "0.3], HOLDOUT: [0, 50, 0]")
    run_sweep(tmp_path, monkeypatch, file=file)
    printed = capsys.readouterr().out
    assert (
        "note: evaluated on different data, which cannot be compared: 100 samples and 50 samples\n" in printed
    )
    with pytest.raises(ConfigError, match="accuracy on different data cannot be compared"):
        run_sweep(tmp_path, monkeypatch, "--confirm=2", file=file)
    assert "A: the first point" not in capsys.readouterr().out, "nothing more is trained"


def test_seeds_that_chose_the_best_point_do_not_confirm_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="FIRST_SEED=2 is not fresh: the best point is chosen by seeds up to 2"
    ):
        run_sweep(tmp_path, monkeypatch, "--confirm=3", "--first-seed=2")
    with pytest.raises(ConfigError, match="FIRST_SEED= needs CONFIRM=: the seeds of a sweep are in its file"):
        run_sweep(tmp_path, monkeypatch, "--first-seed=9")
    for words in (["--confirm=0"], ["--confirm=5 3"], ["--jobs=two"]):
        with pytest.raises(ConfigError):
            run_sweep(tmp_path, monkeypatch, *words)


@pytest.mark.slow
@pytest.mark.parametrize("confirm", [False, True])
def test_a_sweep_uses_runs_of_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, confirm: bool
) -> None:
    """Those of its points, and of the seeds that confirm the best one, which count as looks."""
    (tmp_path / "study.yaml").write_text(FILE)
    experiment = read_experiment(tmp_path / "study.yaml")
    seeds = (3, 4, 5) if confirm else (1,)
    runs = resolved_runs(dataclasses.replace(experiment, seeds=seeds), root=sweep.ROOT)
    for run in runs:
        found = RunDir.create(tmp_path / "runs", model="lenet5", identity=run.identity, files={"config": ""})
        found.set_status("done", step=1, accuracy=0.5)
    run_sweep(tmp_path, monkeypatch, *(["--confirm=5"] if confirm else []))
    printed = capsys.readouterr().out
    there = "6 of 10" if confirm else "3 of 6"
    assert f"{there} runs are there, some from make train\n" in printed
    assert ("3 count as looks" in printed) == confirm


@pytest.mark.slow
@pytest.mark.parametrize(("axis", "metric"), [("", "loss"), (", BEST_METRIC: [accuracy, loss]", "accuracy")])
def test_the_best_point_is_that_by_the_best_metric_of_the_base(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    axis: str,
    metric: str,
) -> None:
    (tmp_path / "by_loss").write_text('CONFIG_BEST_METRIC="loss"\n')
    monkeypatch.setenv("ANNEAL_CONFIG_PATH", str(tmp_path))
    file = FILE.replace("lenet5", "lenet5+by_loss").replace("0.3]", f"0.3]{axis}")
    run_sweep(tmp_path, monkeypatch, file=file)
    assert f"by {metric}: LEARNING_RATE=0.{3 if metric == 'loss' else 2}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "told"), [("", "no SWEEP=; SWEEP= is one of"), ("x", "no sweep 'x';")])
def test_a_sweep_that_is_not_there_is_refused(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"there is {told}"):
        sweep.file_of(name)
