"""make ab: pairs with equal seeds, seeds that are judged once, and the words of the answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lib import atomic
from lib.errors import ConfigError, ToolkitError
from lib.runs.directory import RunDir
from lib.sweeps import paired_comparison
from lib.sweeps.paired_comparison import parse_looks, report
from lib.sweeps.runner import RESULT as RESULT_FILE
from lib.sweeps.runner import Result, Run, known_result, run_folder, train_all
from lib.sweeps.verdict import judge
from scripts import ab
from tests.support.quick_children import QuickChildren

TINY = "lenet5+tiny"


@pytest.fixture(autouse=True)
def _names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fragments").mkdir()
    (tmp_path / "fragments" / "slow").write_text('CONFIG_LEARNING_RATE="0.001"\n')
    (tmp_path / "fragments" / "workers").write_text("CONFIG_NUM_WORKERS=1\n")
    (tmp_path / "fragments" / "seed").write_text("CONFIG_SEED=77\n")
    (tmp_path / "fragments" / "logged").write_text(
        "CONFIG_LOG_INTERVAL_STEPS=7\nCONFIG_SINK_TENSORBOARD=y\nCONFIG_KEEP_LAST=9\nCONFIG_CHECKPOINT_SECONDS=60\n"
    )
    monkeypatch.setenv("ANNEAL_CONFIG_PATH", str(tmp_path / "fragments"))


class FakeTraining:
    """Stands for `train_all`: stores results; B is better than A by `gain`, and by 0.001 more each seed."""

    def __init__(self, gain: float, *, failing: int = 0, coarse: bool = False, loss: float = 0.0) -> None:
        self.gain, self.failing, self.trained = gain, failing, list[str]()
        self.coarse, self.loss = coarse, loss  # every accuracy is 1.0; the loss of B is higher by `loss`

    def __call__(self, runs: Sequence[Run], *, out: Path, **_: Any) -> list[Result]:
        results = []
        for run in runs:
            seed = int(run.settings["SEED"])
            self.trained.append(f"{run.side.strip()}{seed}")
            value = 0.9 + run.number * (self.gain + 0.001 * seed)
            reason = "it fell over" if seed == self.failing else ""
            metrics = {"accuracy": value, "loss": 1 - value, "samples": 4000.0}
            if self.coarse:
                metrics = {"accuracy": 1.0, "loss": 0.1 * seed + run.number * self.loss, "seconds": value}
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
                folder.mkdir(parents=True, exist_ok=True)
                atomic.write_text(folder / RESULT_FILE, json.dumps(dataclasses.asdict(result)))
        return results


def run_ab(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    training: Callable[..., list[Result]],
    *more: str,
    swapped: bool = False,
) -> None:
    monkeypatch.setattr(paired_comparison, "train_all", training)
    a, b = (f"{TINY}+slow", TINY) if swapped else (TINY, f"{TINY}+slow")
    words = ["ab", "--a", a, "--b", b, "--runs", str(tmp_path / "runs"), "--jobs", "1", *more]
    monkeypatch.setattr("sys.argv", words)
    assert ab.main() == 0


@pytest.mark.slow
def test_a_clear_difference_ends_at_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining(0.02)
    run_ab(tmp_path, monkeypatch, training, "--seeds", "3 5")
    printed = capsys.readouterr().out
    assert training.trained == ["A1", "B1", "A2", "B2", "A3", "B3"]
    assert "after 3 pairs: B is better" in printed and "accuracy: A 0.9000, B 0.9220" in printed
    assert "over samples: +- 0.012 at most, from 4000 evaluation samples" in printed


@pytest.mark.slow
@pytest.mark.parametrize("loss", [0.0, 0.01])
def test_identical_means_that_the_losses_are_equal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], loss: float
) -> None:
    """Accuracies that are all 1.0 are no verdict: the looks go on."""
    training = FakeTraining(0.0, coarse=True, loss=loss)
    run_ab(tmp_path, monkeypatch, training, "--seeds", "3 5")
    printed = capsys.readouterr().out
    assert len(training.trained) == (10 if loss else 6)
    for words in ("a difference is not shown", "no confidence interval"):
        assert printed.count(words) == (2 if loss else 0)
    assert ("after 3 pairs: B is identical" in printed) == (not loss)


@pytest.mark.slow
def test_the_next_look_trains_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = FakeTraining(-0.0031)  # differences of -0.0021, -0.0011, -0.0001, 0.0009, 0.0019
    run_ab(tmp_path, monkeypatch, training, "--seeds", "3 5", "--metric", "loss")
    assert len(training.trained) == 10
    assert capsys.readouterr().out.count("a difference is not shown") == 2
    run_ab(tmp_path, monkeypatch, training, "--seeds", "3 5")
    assert len(training.trained) == 10, "all were there"
    assert "  loss: A " in capsys.readouterr().out, "the metric of the first command"


@pytest.mark.slow
def test_looks_are_fixed_by_the_first_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds", "3")
    with pytest.raises(
        ConfigError, match=r"seeds 1 to 3 by accuracy, judged after 3 pairs: .* FIRST_SEED=4 or"
    ):
        run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds", "3 5")


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--first-seed=2"], ["--seeds=2", "--first-seed=3"], ["--metric=loss"], []])
def test_seeds_that_were_judged_are_not_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """With other seeds among them, by another metric, or with A and B swapped; the same command is."""
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds=3")
    training = FakeTraining(-0.0031)
    if more:
        with pytest.raises(ConfigError, match="another test of the same seeds would raise"):
            run_ab(tmp_path, monkeypatch, training, "--seeds=3", *more)
    with pytest.raises(ConfigError, match="FIRST_SEED=4 or larger"):
        run_ab(tmp_path, monkeypatch, training, "--seeds=2", *more, swapped=True)
    run_ab(tmp_path, monkeypatch, training, "--seeds=3", "--metric=accuracy")
    assert training.trained == [], "all were there"


@pytest.mark.slow
def test_fresh_seeds_are_a_comparison_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds=3")
    assert "FIRST_SEED=4" in capsys.readouterr().out.splitlines()[-1]
    run_ab(tmp_path, monkeypatch, FakeTraining(0.02), "--seeds=3", "--first-seed=4", "--metric=loss")
    printed = capsys.readouterr().out
    assert "compared before, with an error probability of its own: seeds 1 to 3 by accuracy" in printed
    assert "seeds 4 to 6, judged after 3 pairs; power by size" in printed and "B is better" in printed


@pytest.mark.slow
def test_a_metric_that_is_no_result_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="METRIC=f1 is not a result"):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.02), "--seeds=3", "--metric=f1")
    run_ab(tmp_path, monkeypatch, FakeTraining(0.02), "--seeds=3", "--metric=loss")


@pytest.mark.slow
@pytest.mark.parametrize("first", ["1", "2"])
def test_pairs_that_exist_count_as_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: str
) -> None:
    """Wherever they are among the seeds, in case somebody has looked at them."""
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds=3", f"--first-seed={first}")
    (record,) = (tmp_path / "runs" / "ab").glob("*.json")
    record.unlink()
    run_ab(tmp_path, monkeypatch, FakeTraining(-0.0031), "--seeds=5")
    assert "3 count as looks, since those pairs exist" in capsys.readouterr().out


@pytest.mark.slow
def test_a_damaged_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ab(tmp_path, monkeypatch, FakeTraining(0.02), "--seeds=3")
    (record,) = (tmp_path / "runs" / "ab").glob("*.json")
    record.write_text("[")
    with pytest.raises(ToolkitError, match="is damaged"):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.02), "--seeds=3")


@pytest.mark.slow
def test_a_failed_run_is_named_and_no_verdict_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ToolkitError, match="2 of 6 runs failed: A with seed 2: it fell over; B with seed 2"):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.02, failing=2), "--seeds", "3")


def test_a_configuration_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, missing in ((["--a", TINY], "there is no B=;"), ([], "there is no A= and B=;")):
        monkeypatch.setattr("sys.argv", ["ab", *words])
        with pytest.raises(ConfigError, match=missing):
            ab.main()


@pytest.mark.slow
@pytest.mark.parametrize("b", [TINY, f"{TINY}+workers", f"{TINY}+logged", f"{TINY}+seed"])
def test_two_configurations_that_train_the_same_are_refused(b: str) -> None:
    with pytest.raises(ConfigError, match="are the same run"):
        ab.make_pairs(TINY, b, [1])


def test_results_on_different_data_are_not_compared() -> None:
    with pytest.raises(ConfigError, match=r"A=lenet5 is evaluated on digits, and B=resnet18 on scenes"):
        ab.make_pairs("lenet5", "resnet18", [1])


@pytest.mark.parametrize(
    ("a", "b", "metric", "why"),
    [
        (
            "lenet5",
            "lenet5+held",
            "",
            r"on CONFIG_HOLDOUT=0, and B=lenet5\+held on CONFIG_HOLDOUT=500; give both",
        ),
        (
            "gpt2-tiny+bpe",
            "gpt2-tiny",
            "",
            "on CONFIG_TOKENIZER=gpt2, and B=gpt2-tiny on CONFIG_TOKENIZER=byte; .* or METRIC=bits",
        ),
        ("gpt2-tiny+bpe", "gpt2-tiny", "bits_per_byte", ""),
        (  # of windows of other tokens
            "gpt2-tiny+bpe+held",
            "gpt2-tiny+held",
            "bits_per_byte",
            "on CONFIG_TOKENIZER=gpt2, and B=",
        ),
        ("gpt2-sst2", "gpt2-sst2+byte", "", ""),  # its figures are of sentences
    ],
)
def test_other_samples_or_tokens_of_the_same_data_are_not_compared(
    tmp_path: Path, a: str, b: str, metric: str, why: str
) -> None:
    for name, option in (("held", "HOLDOUT=500"), ("bpe", "TOKENIZER_GPT2=y"), ("byte", "TOKENIZER_BYTE=y")):
        (tmp_path / "fragments" / name).write_text(f"CONFIG_{option}\n")
    with pytest.raises(ConfigError, match=why) if why else contextlib.nullcontext():
        assert len(ab.make_pairs(a, b, [1], metric)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["samples", "part"])
def test_no_verdict_is_given_on_evaluations_of_different_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    class OtherData(FakeTraining):
        def __call__(self, runs: Sequence[Run], *, out: Path, **_: Any) -> list[Result]:
            results = super().__call__(runs, out=out)
            for run in runs:
                file = run_folder(run, out) / RESULT_FILE
                content = json.loads(file.read_text())
                content["part"] = ("test part", "held-out samples")[run.number if kind == "part" else 0]
                if kind == "samples":
                    content["metrics"]["samples"] -= 3500 * run.number
                file.write_text(json.dumps(content))
            return results

    told = {"samples": "4,000 samples and 500 samples", "part": "held-out samples and test part"}[kind]
    with pytest.raises(ConfigError, match=f"^accuracy on different data cannot be compared: .* {told}$"):
        run_ab(tmp_path, monkeypatch, OtherData(0.02), "--seeds", "2")
    assert "after 2 pairs: " not in capsys.readouterr().out


def test_more_pairs_than_show_anything_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="SEEDS=5 5000000 are more than 200 pairs"):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.0), "--seeds=5 5000000")
    assert parse_looks("200", "SEEDS") == [200]


@pytest.mark.parametrize("metric", ["loss", "exact_accuracy", "accuracy"])
@pytest.mark.parametrize("samples", [{}, {"samples": 100.0}])
def test_the_error_of_the_evaluation_set_is_told_or_not_known(metric: str, samples: dict[str, float]) -> None:
    results = [({metric: 0.5, **samples}, {metric: 0.4 + seed / 50, **samples}) for seed in range(3)]
    verdict = judge([b[metric] - a[metric] for a, b in results], [3], higher_is_better=True)
    line = report(verdict, metric, results)[-1]
    is_known = metric != "loss" and bool(samples)
    assert ("from 100 evaluation samples" in line) == is_known
    assert line.endswith(f"evaluation set is not known for {metric}") != is_known


@pytest.mark.parametrize("value", ["0", "x", "5.5", "-1"])
def test_seeds_are_whole_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with pytest.raises(ConfigError, match="SEEDS="):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.0), f"--seeds={value}")


def test_an_unknown_metric_is_refused_with_those_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"METRIC=f1 .* accuracy, loss"):
        run_ab(tmp_path, monkeypatch, FakeTraining(0.0), "--seeds", "2", "--metric", "f1")


def done_run(runs: Path, run: Run, *, state: Any = "done") -> None:
    files: Any = {"config": "", "values": run.resolved.to_json()["values"]}
    found = RunDir.create(runs, model="lenet5", identity=run.identity, files=files)
    found.set_status(state, step=2, accuracy=0.5, loss=0.3, part="test")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "named"),
    [("", "make train"), ("sweeps/study/{}", "sweeps/study"), ("ab/{}", "ab"), ("more/{}", "more")],
)
def test_runs_of_other_commands_are_reused_and_count_as_looks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    named: str,
) -> None:
    runs, pairs = tmp_path / "runs", ab.make_pairs(TINY, f"{TINY}+slow", [1, 2, 3])
    others = [run for pair in pairs for run in pair]
    for run in others:
        done_run(runs / place.format(run.identity), run)
    training = FakeTraining(0.02)
    run_ab(tmp_path, monkeypatch, training, "--seeds=5", f"--out={tmp_path / 'runs' / 'mine'}")
    printed = capsys.readouterr().out
    assert training.trained == ["A4", "B4", "A5", "B5"]
    assert f"6 of 10 runs are there, some from {named}\n" in printed
    assert "3 count as looks, since those pairs exist" in printed
    assert "accuracy: A 0.6600" in printed, "0.5 three times, and 0.9"
    known = known_result(others[0], tmp_path / "runs" / "mine")
    assert known is not None and known.part == "test"
    run_ab(tmp_path, monkeypatch, training, "--seeds=5", f"--out={tmp_path / 'runs' / 'mine'}")
    assert "10 of 10 runs are there\n" in capsys.readouterr().out


@pytest.mark.slow
def test_runs_that_are_not_done_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = ab.make_pairs(TINY, f"{TINY}+slow", [1, 2, 3])
    done_run(tmp_path / "runs", pairs[0][0])
    done_run(tmp_path / "runs", pairs[0][1], state="failed")
    training = FakeTraining(0.02)
    run_ab(tmp_path, monkeypatch, training, "--seeds=3")
    assert training.trained == ["B1", "A2", "B2", "A3", "B3"]
    printed = capsys.readouterr().out
    assert "1 of 6 runs is there, some from make train" in printed and "count as looks" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 9])
def test_a_metric_that_an_earlier_run_does_not_report_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    done_run(tmp_path / "runs", ab.make_pairs(TINY, f"{TINY}+slow", [seed])[0][1])
    training = FakeTraining(0.02)
    with pytest.raises(ConfigError, match=r"METRIC=f1 is not .*; choose one of accuracy, loss"):
        run_ab(tmp_path, monkeypatch, training, "--seeds=3", "--metric=f1")
    assert training.trained == []
    run_ab(tmp_path, monkeypatch, training, "--seeds=3", "--metric=accuracy")


@pytest.mark.slow
def test_a_comparison_ends_after_a_change_of_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children = QuickChildren(tmp_path / "program", monkeypatch)
    for code, trained in (("one", 4), ("two", 8), ("two", 8)):
        children.edit(code)
        run_ab(tmp_path, monkeypatch, train_all, "--seeds=2")
        assert "after 2 pairs: " in capsys.readouterr().out and len(children.trained) == trained
