"""Experiment files: YAML 1.2, merging by defaults, and the runs that follow from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ConfigError, Suspended
from lib.runs.code import plugin_digests
from lib.runs.directory import RunDir, Status
from lib.sweeps import runner
from lib.sweeps.concurrency import Concurrency, HostMemoryEstimate
from lib.sweeps.experiment import Experiment, merged, read_experiment
from lib.sweeps.points import table
from lib.sweeps.runner import known_result, resolved_runs, time_left, train_all, write_results
from lib.sweeps.subprocess_run import Children, ChildRun
from lib.sweeps.yaml12 import read_yaml

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "defconfigs" / "sweeps").glob("*.yaml"))


def written(folder: Path, text: str, name: str = "study") -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4e-4", 4e-4),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("12:30:00", "12:30:00"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("", None),
        ("'4e-4'", "4e-4"),
        ("[1, 2.0, a]", [1, 2.0, "a"]),
        ("1_000", "1_000"),
    ],
)
def test_values_are_those_of_yaml_1_2(tmp_path: Path, text: str, value: Any) -> None:
    found = read_yaml(written(tmp_path, f"a: {text}\n")).content["a"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "study.yaml:3: a is given twice"),
        ("a: [1\n", "study.yaml:2"),
        ("- a\n", "holds no mapping"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("a: 1\nb: \x01\n", "study.yaml:2: special characters are not allowed"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_yaml(written(tmp_path, text))


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_bytes(b"\xef\xbb\xbfconfig: lenet5\nsed: 1\n")
    assert read_yaml(file).content == {"config": "lenet5", "sed": 1}
    with pytest.raises(ConfigError, match=r"study\.yaml:2: there is no key sed"):
        read_experiment(file)


def test_a_fault_has_the_line_where_it_is_written(tmp_path: Path) -> None:
    """In a file of its defaults, in a list over several lines, for the axis of a search."""
    base = written(
        tmp_path, "config: lenet5\nset:\n  MAX_STEPS:\n    1\naxes: {EMA: [true, false]}\n", "base"
    )
    experiment = read_experiment(written(tmp_path, "defaults: [base]\naxes:\n  EMA:\n  - true\n  - 7\n"))
    own = tmp_path / "study.yaml"
    assert experiment.place("MAX_STEPS", "1") == f"{base}:3"
    assert [experiment.place("EMA", value) for value in ("y", "7", "n")] == [f"{own}:{n}" for n in (4, 5, 3)]
    assert experiment.place("SEED", "1") == str(own), "nobody wrote it"
    for text, line in (("seeds: 0", 2), ("axes:\n  EMA: []", 3), ("sweep: all", 2), ("minimize: loss", 2)):
        with pytest.raises(ConfigError, match=rf"study\.yaml:{line}: "):
            read_experiment(written(tmp_path, f"config: lenet5\n{text}\n"))


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_bytes("about: café\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"study\.yaml is not in UTF-8"):
        read_yaml(file)


def test_defaults_are_merged_below_and_after_self_above(tmp_path: Path) -> None:
    written(tmp_path, "config: lenet5\nset: {MAX_SAMPLES: 1, MAX_STEPS: 5}\naxes: {EMA: [true]}\n", "base")
    written(tmp_path, "set: {MAX_SAMPLES: 7}\n", "last")
    own = "set: {MAX_SAMPLES: 2, GRAD_CLIP: 1.5, MAX_STEPS: null}\naxes: {EMA: [false, true]}\n"
    file = written(tmp_path, f"defaults: [base]\n{own}")
    assert merged(file).content == {
        "config": "lenet5",
        "set": {"MAX_SAMPLES": 2, "MAX_STEPS": None, "GRAD_CLIP": 1.5},
        "axes": {"EMA": [False, True]},
    }
    file = written(tmp_path, f"defaults: [base, _self_, last]\n{own}")
    assert merged(file).content["set"] == {"MAX_SAMPLES": 7, "MAX_STEPS": None, "GRAD_CLIP": 1.5}
    assert read_experiment(file).settings == {"MAX_SAMPLES": "7", "GRAD_CLIP": "1.5"}


def test_a_cycle_of_defaults_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "defaults: [two]\n", "one")
    file = written(tmp_path, "defaults: [one]\n", "two")
    with pytest.raises(
        ConfigError, match=r"the defaults of two\.yaml lead back to it: two\.yaml -> one\.yaml -> two\.yaml"
    ):
        merged(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 1", "no key sed; did you mean se"),
        ("seeds: none", "seeds is neither a number of seeds nor a list"),
        ("sweep: all", "no sweep all; one of grid, zip, random, optuna"),
        ("axes: {EMA: true}", "the axis EMA is not a list"),
        ("axes: {MAX_STEPS: [1], EMA: [true, false]}\nsweep: zip", r"one length, not \[1, 2\]"),
        ("axes: {EMA: [true]}\nsweep: random", "needs samples"),
        ("axes: {EMA: [true]}\nsweep: random\nsamples: -1", "needs samples"),
        ("axes: {EMA: [true]}\nsweep: random\nsamples: true", "needs samples"),
        ("axes: {EMA: [true]}\nsamples: 3", "samples is for sweep: random"),
        ("sweep: zip\ndraw_seed: 3", "draw_seed is for sweep: random"),
        ("seeds: [true]", "seeds is neither a number of seeds nor a list"),
        ("seeds: [2, 3, 2]", "a seed is given twice"),
        ("set: {SEED: 7}", "SEED comes from seeds"),
        ("axes: {SEED: [7, 8]}", "SEED comes from seeds"),
        ("defaults: [nowhere]", r"there is no nowhere\.yaml beside it"),
        ("set: {CONFIG_SEED: 1}", "written without CONFIG_"),
        ("set: {EMA: {a: 1}}", r"study\.yaml:2: EMA is a mapping, and an option takes one value"),
        ("axes: {EMA: [true, null]}", r"study\.yaml:2: EMA is null"),
        ("set: {SINK_PROJECT: [[a], b]}", r"study\.yaml:2: SINK_PROJECT is a list in a list"),
        ("defaults: base", "defaults is not a list"),
    ],
)
def test_malformed_experiments_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_experiment(written(tmp_path, f"config: lenet5\n{text}\n"))
    with pytest.raises(ConfigError, match="names no configuration"):
        read_experiment(written(tmp_path, "seeds: 1\n"))


def study(tmp_path: Path, text: str) -> Experiment:
    return read_experiment(written(tmp_path, f"config: lenet5\nset: {{BUDGET_STEPS: true}}\n{text}\n"))


AXES = "axes: {MAX_STEPS: [1, 2], LEARNING_RATE: [1e-3, 0.5]}\n"


def test_grid_zip_and_random(tmp_path: Path) -> None:
    def points(text: str) -> list[tuple[str, ...]]:
        return [tuple(point.values()) for point in study(tmp_path, AXES + text).points]

    every = [("1", "0.001"), ("1", "0.5"), ("2", "0.001"), ("2", "0.5")]
    assert points("sweep: grid") == every
    assert points("sweep: zip") == [("1", "0.001"), ("2", "0.5")]
    drawn = points("sweep: random\nsamples: 3")
    assert len(set(drawn)) == 3 and set(drawn) < set(every)
    assert drawn == points("sweep: random\nsamples: 3")
    assert sorted(points("sweep: random\nsamples: 99")) == every
    assert study(tmp_path, "").points == ({},) and study(tmp_path, "").seeds == (1, 2, 3)


def test_a_few_points_are_drawn_of_more_than_memory_could_hold(tmp_path: Path) -> None:
    axes = ", ".join(f"AXIS_{number}: [{', '.join(map(str, range(100)))}]" for number in range(9))
    drawn = study(tmp_path, f"axes: {{{axes}}}\nsweep: random\nsamples: 50").points
    assert len(drawn) == 50 and list(drawn[0]) == [f"AXIS_{number}" for number in range(9)]
    for name in drawn[0]:
        assert len({point[name] for point in drawn}) > 30, "each axis is drawn from as a whole"


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
