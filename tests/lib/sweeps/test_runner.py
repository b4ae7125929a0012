"""The runs of an experiment, each trained once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ConfigError, Suspended
from lib.runs.directory import RunDir, Status
from lib.runs.identity import plugin_digests
from lib.sweeps import runner
from lib.sweeps.concurrency import Concurrency, HostMemoryEstimate
from lib.sweeps.experiment import read_experiment
from lib.sweeps.result_table import table
from lib.sweeps.runner import known_result, resolved_runs, time_left, train_all, write_results
from lib.sweeps.subprocess_run import Children, ChildRun
from tests.lib.sweeps.test_experiment import AXES, study, written
from tests.support.quick_children import QuickChildren

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "defconfigs" / "sweeps").glob("*.yaml"))


def test_runs_are_checked_one_and_all_before_the_first(tmp_path: Path) -> None:
    experiment = study(tmp_path, "axes:\n  MAX_STEP: [1]\n  LEARNING_RATE: [0.1,\n    -1]")
    with pytest.raises(ConfigError, match="2 of 2 points of study cannot be configured") as error:
        resolved_runs(experiment, root=ROOT)
    assert not list(tmp_path.glob("[!s]*")), "nothing was written"
    unknown, negative = error.value.findings
    file = tmp_path / "study.yaml"
    assert unknown == f"{file}:4: MAX_STEP is not a symbol; did you mean MAX_STEPS?"
    assert negative.startswith(f"{file}:6: LEARNING_RATE: -1 is out") and negative.endswith(" (point 2)")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("set: {EMA: yes}", "2: EMA: yes is not true or false; write EMA: true"),
        (
            "set: {EMA_DECAY: 0.9}",
            "2: EMA_DECAY: 0.9 has no effect: it needs EMA: true (now false); add EMA: true",
        ),
        (
            "set: {OPTIMIZER_ADAMW: false}",
            "2: OPTIMIZER_ADAMW: false leaves no member of the choice; set another to true",
        ),
        ("axes: {MODEL: [resnet18]}", "2: MODEL cannot be set (now lenet5): it follows from MODEL_"),
        (
            "set: {OPTIMIZER_SGD: true, NESTEROV: true, MOMENTUM: 0}",
            "2: NESTEROV: true needs a momentum above 0",
        ),
    ],
)
def test_a_value_is_refused_in_the_words_of_the_file(tmp_path: Path, text: str, told: str) -> None:
    experiment = read_experiment(written(tmp_path, f"config: lenet5\n{text}\nseeds: 1\n"))
    with pytest.raises(ConfigError) as error:
        resolved_runs(experiment, root=ROOT)
    (finding,) = error.value.findings
    assert finding.startswith(f"{tmp_path / 'study.yaml'}:{told}") and "CONFIG_" not in finding


def test_a_value_that_loses_its_effect_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.yaml").write_text("config: vit-tiny-scenes\nset: {AUGMENT_NONE: true}\nseeds: 2\n")
    runner._report.cache_clear()
    for _ in range(2):
        resolved_runs(read_experiment(tmp_path / "study.yaml"), root=ROOT)
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: study: AUGMENT_PAD: 2 has no effect: ") and "AUGMENT_NONE: true" in note


def test_an_unknown_configuration_has_its_place(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"study\.yaml:2: there is no configuration called 'lenet'; did you"
    ):
        resolved_runs(read_experiment(written(tmp_path, "seeds: 1\nconfig: lenet\n")), root=ROOT)


@pytest.mark.slow
def test_identity_is_that_of_the_whole_configuration(tmp_path: Path) -> None:
    one = resolved_runs(study(tmp_path, AXES), root=ROOT)
    assert len({run.identity for run in one}) == len(one) == 12
    other = study(tmp_path, "seeds: [3]\naxes: {LEARNING_RATE: [0.5], MAX_STEPS: [2]}")
    (same,) = resolved_runs(other, root=ROOT)
    assert same.identity == one[-1].identity, "however it was written"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Configurations that were trained; those of two steps fail, as long as "mended" is not among them."""
    found: list[str] = []

    class Run:
        @staticmethod
        def status() -> Status:
            facts = {"accuracy": 0.5 + 0.1 * len(found), "seconds": 1.0, "samples": 10, "part": "test"}
            return Status(state="done", facts=facts)

        @staticmethod
        def read_json(name: str) -> dict[str, Any]:
            assert name == "plugins"
            digests = plugin_digests("lenet5", "classify", "digits")
            return {kind: {"folder": kind, "sha256": digest} for kind, digest in digests.items()}

    def train(_: Children, place: Path, configuration: str, *, root: Path) -> ChildRun:
        assert root == ROOT
        found.append(configuration)
        place.mkdir(parents=True, exist_ok=True)
        fails = "CONFIG_MAX_STEPS=2\n" in configuration and "mended" not in found
        cost = {"stopped": False, "seconds_cpu": 2.0, "peak_memory_mb": 100.0}
        return ChildRun(run=None if fails else Run(), reason="it broke" if fails else "", **cost)  # type: ignore[arg-type]

    monkeypatch.setattr(Children, "train", train)
    return found


def nobody(_: object) -> HostMemoryEstimate:
    raise AssertionError("nothing is predicted for one run at a time")


def test_a_failure_does_not_stop_the_rest_and_only_it_is_run_again(
    tmp_path: Path, trained: list[str]
) -> None:
    experiment = study(tmp_path, "axes: {MAX_STEPS: [1, 2, 3]}\nseeds: 2")
    runs = resolved_runs(experiment, root=ROOT)
    logged: list[str] = []

    def results() -> list[runner.Result]:
        done = train_all(
            runs,
            root=ROOT,
            out=tmp_path / "out",
            concurrency=Concurrency(1, nobody),
            log=logged.append,
            later=9,
        )
        write_results(tmp_path / "out", done)
        return done

    first = results()
    assert [bool(result.reason) for result in first] == [False, False, True, True, False, False]
    lines = table(experiment, first)
    assert lines[0].split()[:5] == ["point", "seeds", "accuracy", "accuracy", "-"]
    assert lines[1].split() == ["MAX_STEPS=1", "2/2", "0.6500", "+-", "0.0707"]
    assert lines[2].split() == ["MAX_STEPS=2", "0/2", "-"]
    assert len(trained) == 6
    left = [int(line.split()[0]) for line in logged if " left, about 0:00:0" in line]
    assert left == [14, 13, 12, 11, 10, 9], "those that follow included"
    trained.append("mended")
    second = results()
    assert len(trained) == 6 + 1 + 2 and not any(result.reason for result in second)
    assert second[0] == first[0] and sum("already there" in line for line in logged) == 4
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["identity"] for row in rows] == [run.identity for run in runs]


def test_the_remaining_time_counts_runs_and_workers() -> None:
    assert time_left([("A", 50.0), ("A", 70.0)], left=["A"] * 5, workers=1) == "5 runs left, about 0:05:00"
    assert time_left([("A", 60.0)], left=["A"] * 6, workers=2) == "6 runs left, about 0:03:00"
    assert time_left([("A", 60.0)], left=["A"], workers=4) == "1 run left, about 0:01:00"
    quick_and_slow = [("A", 10.0), ("A", 20.0), ("B", 100.0)]
    assert time_left(quick_and_slow, left=["A", "B", "B"], workers=1) == "3 runs left, about 0:03:35"
    assert time_left(quick_and_slow, left=["A", "B"], workers=4) == "2 runs left, about 0:01:40", (
        "the slow one"
    )
    assert time_left([("A", 10.0), ("B", 20.0)], left=["C", None], workers=1) == "2 runs left, about 0:00:30"


def test_a_stopped_run_is_no_failure_and_resumes_next_time(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = study(tmp_path, "axes: {MAX_STEPS: [1, 3, 4]}\nseeds: 1")
    runs, out = resolved_runs(experiment, root=ROOT), tmp_path / "out"
    whole, logged = Children.train, list[str]()

    def stops(children: Children, place: Path, configuration: str, *, root: Path) -> ChildRun:
        if "CONFIG_MAX_STEPS=1\n" in configuration:
            children.stopped_by = "SIGTERM"  # while it ends by itself
            return whole(children, place, configuration, root=root)
        children.stopped_by = "SIGTERM"
        return ChildRun(
            run=None, reason="stopped after step 7", stopped=True, seconds_cpu=1.0, peak_memory_mb=1.0
        )

    monkeypatch.setattr(Children, "train", stops)
    with pytest.raises(Suspended, match="stopped by SIGTERM; 1 of 3 runs are done") as error:
        train_all(runs, root=ROOT, out=out, concurrency=Concurrency(1, nobody), log=logged.append)
    assert error.value.exit_code == 75 and any(line.endswith("stopped after step 7") for line in logged)
    assert not any(" left, about" in line for line in logged), "none begins after it"
    assert [known_result(run, out) is None for run in runs] == [False, True, True]
    monkeypatch.setattr(Children, "train", whole)
    again = train_all(runs, root=ROOT, out=out, concurrency=Concurrency(1, nobody), log=logged.append)
    assert len(trained) == 3 and not any(result.reason for result in again)


def test_a_result_by_other_code_is_not_taken_for_that_of_todays(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, out = resolved_runs(study(tmp_path, "seeds: 2"), root=ROOT), tmp_path / "out"
    folder, logged = tmp_path / "runs", list[str]()
    elsewhere = RunDir.create(folder, model="lenet5", identity=runs[1].identity, files={"config": ""})
    files = {"values": dict(runs[1].resolved.values), "plugins": {"model": {"sha256": "of another"}}}
    for name, content in files.items():
        elsewhere.write(name, content)
    elsewhere.set_status("done", step=3, accuracy=0.25)
    elsewhere.release()

    def results() -> list[runner.Result]:
        logged.clear()
        runner.adopt(runs, out=out, folder=folder, log=logged.append)
        return train_all(runs, root=ROOT, out=out, concurrency=Concurrency(1, nobody), log=logged.append)

    first = results()
    assert len(trained) == 2, "the run that is there is of another code"
    assert f"{elsewhere.path.relative_to(folder)}: not used, as the code of its model has changed" in logged
    assert results() == first and len(trained) == 2
    changed = {"model": "of tomorrow", "task": runs[0].code["task"]}
    monkeypatch.setattr(runner, "plugin_digests", lambda *_: changed)
    results()
    assert len(trained) == 4
    assert sum(line.endswith("trained again, as the code of its model has changed") for line in logged) == 2


def train_again(runs: list[runner.Run], out: Path) -> tuple[list[runner.Result], str]:
    logged = list[str]()
    return train_all(
        runs, root=ROOT, out=out, concurrency=Concurrency(1, nobody), log=logged.append
    ), "\n".join(logged)


@pytest.mark.slow
def test_after_a_change_of_code_each_run_is_trained_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, out = resolved_runs(study(tmp_path, "seeds: 1"), root=ROOT), tmp_path / "out"
    children = QuickChildren(tmp_path / "program", monkeypatch)
    found = []
    for code in ("one", "one", "two", "two", "one", "one"):
        children.edit(code)
        ((result,), logged) = train_again(runs, out)
        assert result.code["model"] == code and result == known_result(runs[0], out)
        found.append((result.metrics["accuracy"], logged.split(": ", 1)[1].split(",")[0].split("\n")[0]))
    assert found == [
        (1, "done"),
        (1, "already there"),
        (2, "trained again"),
        (2, "already there"),
        (1, "done; the sweep that started it had ended"),
        (1, "already there"),
    ]
    assert len(children.trained) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "resumes"),
    [
        ({"sha256": "today's"}, True),
        ({"sha256": "older"}, False),
        ({"sha256": "today's", "former": ["x"]}, False),
    ],
)
def test_a_run_that_began_with_other_code_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: dict[str, Any], resumes: bool
) -> None:
    (run,), out = resolved_runs(study(tmp_path, "seeds: 1"), root=ROOT), tmp_path / "out"
    files = {"config": "", "values": {}, "plugins": {"model": code}}
    begun = RunDir.create(out / run.identity, model="lenet5", identity=run.identity, files=files)
    begun.set_status("preempted", step=3)
    begun.release()
    children = QuickChildren(tmp_path / "program", monkeypatch)
    children.edit("today's")
    (result,), logged = train_again([run], out)
    assert known_result(run, out) == result and "warning" not in logged
    assert (children.trained == [begun.name]) == resumes
    assert (f"{begun.path} is not resumed, as the code of its model has changed" in logged) != resumes
    assert train_again([run], out)[0] == [result] and len(children.trained) == 1


def test_code_that_is_edited_while_a_sweep_runs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, out = resolved_runs(study(tmp_path, "seeds: 2"), root=ROOT), tmp_path / "out"
    children = QuickChildren(tmp_path / "program", monkeypatch)
    children.edit("new")
    children.edit("newer", seen=False)
    _, logged = train_again(runs[:1], out)
    warning = "warning: the code of its model is not the one that this command began with; give the same"
    assert logged.count(warning) == 1 and known_result(runs[0], out) is None
    children.edit("newer")
    (first, second), logged = train_again(runs, out)
    assert "warning" not in logged and len(children.trained) == 2
    assert first.code == second.code == runs[0].code


def test_the_code_is_hashed_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[str]
) -> None:
    runs, seen = resolved_runs(study(tmp_path, "seeds: 2"), root=ROOT), list[int]()
    digests = plugin_digests("lenet5", "classify", "digits")
    monkeypatch.setattr(runner, "plugin_digests", lambda *_: seen.append(len(trained)) or digests)
    train_again(runs, tmp_path / "out")
    assert seen[:2] == [0, 0], "of each run"


def test_a_run_that_outlived_its_sweep_is_not_trained_twice(tmp_path: Path, trained: list[str]) -> None:
    runs = resolved_runs(study(tmp_path, "axes: {MAX_STEPS: [1, 3]}\nseeds: 1"), root=ROOT)
    out = tmp_path / "out"
    orphan, other = (
        RunDir.create(out / run.identity, model="lenet5", identity=run.identity, files={"config": ""})
        for run in runs
    )
    other.set_status("done", step=3, accuracy=0.25)
    other.release()

    def results() -> list[runner.Result]:
        return train_all(runs, root=ROOT, out=out, concurrency=Concurrency(1, nobody), log=print)

    first = results()
    assert "is in use: process" in first[0].reason and not trained
    assert (first[1].metrics["accuracy"], first[1].reason, first[1].seconds_cpu) == (0.25, "", None)
    assert known_result(runs[0], out) is None and known_result(runs[1], out) == first[1]
    orphan.release()  # it was killed
    assert not results()[0].reason and len(trained) == 1
    (out / runs[1].identity / runner.RESULT).write_text(json.dumps({"reason": "it was not copied"}))
    assert results()[1].metrics["accuracy"] != 0.25 and len(trained) == 2, "what has failed is tried again"


def test_a_run_that_was_done_already_does_not_shorten_the_remaining_time(
    tmp_path: Path, trained: list[str]
) -> None:
    runs = resolved_runs(study(tmp_path, "axes: {MAX_STEPS: [1, 3, 4]}\nseeds: 1"), root=ROOT)
    out, logged = tmp_path / "out", list[str]()
    done = RunDir.create(
        out / runs[0].identity, model="lenet5", identity=runs[0].identity, files={"config": ""}
    )
    done.set_status("done", step=1, accuracy=0.25)
    done.release()
    runs[2] = dataclasses.replace(runs[2], side="B ")
    concurrency = Concurrency(1, nobody)
    train_all(runs, root=ROOT, out=out, concurrency=concurrency, log=logged.append)
    assert [point for point, _ in concurrency.took] == [run.point for run in runs[1:]], "for a later call"
    assert any(line.startswith(f"B {runs[2].identity} ") for line in logged), "of make ab"
    assert len(trained) == 2 and any("the sweep that started it had ended" in line for line in logged)
    assert [line.split(",")[0] for line in logged if " left" in line] == ["1 run left"]


def test_runs_that_are_the_same_are_refused(tmp_path: Path) -> None:
    same = study(tmp_path, "axes: {LEARNING_RATE: [4e-4, 0.5, '0.00040']}\nseeds: 1")
    with pytest.raises(ConfigError, match="1 of 3 points of study cannot be configured") as error:
        resolved_runs(same, root=ROOT)
    assert error.value.findings == ("study: trains the same as point 1 (point 3)",)


@pytest.mark.slow
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_studies_can_be_run(file: Path) -> None:
    experiment = read_experiment(file)
    assert experiment.about and len(experiment.seeds) >= 3
    runs = resolved_runs(experiment, root=ROOT)
    assert len(runs) == len(experiment.points) * len(experiment.seeds)
