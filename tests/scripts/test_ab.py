"""make ab: pairs with equal seeds, looks that are fixed, and the words of the answer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lib import atomic
from lib.errors import ConfigError, ToolkitError
from lib.runs.directory import RunDir
from lib.sweeps.runner import RESULT as RESULT_FILE
from lib.sweeps.runner import Result, Run, run_folder
from scripts import ab

TINY = "lenet5+tiny"


@pytest.fixture(autouse=True)
def _names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fragments").mkdir()
    (tmp_path / "fragments" / "slow").write_text('CONFIG_LEARNING_RATE="0.001"\n')
    (tmp_path / "fragments" / "workers").write_text("CONFIG_NUM_WORKERS=1\n")
    monkeypatch.setenv("ANNEAL_CONFIG_PATH", str(tmp_path / "fragments"))


class FakeTraining:
    """Stands for `train_all`: stores results; B is better than A by `gain`, and by 0.001 more each seed."""

    def __init__(self, gain: float, *, failing: int = 0) -> None:
        self.gain, self.failing, self.trained = gain, failing, list[str]()

    def __call__(self, runs: Sequence[Run], *, out: Path, **_: Any) -> list[Result]:
        results = []
        for run in runs:
            seed = int(run.settings["SEED"])
            self.trained.append(f"{ab.SIDES[run.number]}{seed}")
            value = 0.9 + run.number * (self.gain + 0.001 * seed)
            reason = "it fell over" if seed == self.failing else ""
            metrics = {"accuracy": value, "loss": 1 - value, "samples": 4000.0}
            result = Result(
                number=run.number,
                identity=run.identity,
                settings=run.settings,
                metrics=metrics,
                reason=reason,
            )
            results.append(result)
            if not reason:
                folder = run_folder(run, out)
                folder.mkdir(parents=True)
                atomic.write_text(folder / RESULT_FILE, json.dumps(dataclasses.asdict(result)))
        return results


def run_ab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: FakeTraining, *more: str) -> None:
    monkeypatch.setattr(ab, "train_all", training)
    words = ["ab", "--a", TINY, "--b", f"{TINY}+slow", "--out", str(tmp_path / "ab"), "--jobs", "1", *more]
    monkeypatch.setattr("sys.argv", words)
    assert ab.main() == 0


def test_a_clear_difference_ends_at_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining(0.02)
    run_ab(tmp_path, monkeypatch, training, "--seeds", "3 5")
    printed = capsys.readouterr().out
    assert training.trained == ["A1", "B1", "A2", "B2", "A3", "B3"]
    assert "after 3 pairs: B is better" in printed and "accuracy: A 0.9000, B 0.9220" in printed
    assert "over samples: 4000 evaluation samples" in printed


def test_the_next_look_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining(-0.0031)  # differences of -0.0021, -0.0011, -0.0001, 0.0009, 0.0019
    run_ab(tmp_path, monkeypatch, training, "--seeds", "3 5", "--metric", "loss")
    assert len(training.trained) == 10
    assert capsys.readouterr().out.count("a difference is not shown") == 2
    run_ab(tmp_path, monkeypatch, training, "--seeds", "3 5")
    assert len(training.trained) == 10, "all were there"


def test_looks_are_fixed_by_the_first_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds", "3")
    with pytest.raises(ConfigError, match=r'begun with SEEDS="3".*FIRST_SEED=4'):
        run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds", "3 5")
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds", "3", "--first-seed", "4")


def test_runs_that_exist_count_as_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds", "3")
    for file in (tmp_path / "ab").glob(f"*/{ab.LOOKS_FILE}"):
        file.unlink()
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds", "5")
    assert "3 count as looks, since those pairs exist" in capsys.readouterr().out


def test_a_failed_run_is_named_and_no_verdict_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ToolkitError, match="2 of 6 runs failed: A with seed 2: it fell over; B with seed 2"):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.02, failing=2), "--seeds", "3")


@pytest.mark.parametrize("b", [TINY, f"{TINY}+workers"])
def test_two_configurations_that_train_the_same_are_refused(b: str) -> None:
    with pytest.raises(ConfigError, match="are the same run"):
        ab.make_pairs(TINY, b, [1])


@pytest.mark.parametrize("value", ["0", "x", "5.5", "-1"])
def test_seeds_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with pytest.raises(ConfigError, match="SEEDS="):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.0), f"--seeds={value}")


def test_an_unknown_metric_is_refused_with_those_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"METRIC=f1 .* accuracy, loss"):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.0), "--seeds", "2", "--metric", "f1")


def test_a_run_of_make_train_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = ab.make_pairs(TINY, f"{TINY}+slow", [1])[0]
    run = RunDir.create(tmp_path / "runs", model="lenet5", identity=pair.a.identity, files={"config": ""})
    run.set_status("done", step=2, accuracy=0.5, part="test")
    monkeypatch.setattr(ab, "ROOT", tmp_path)
    assert ab._known(pair.a, tmp_path / "ab") == {"accuracy": 0.5}
    assert ab._known(pair.b, tmp_path / "ab") is None
