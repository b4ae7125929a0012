"""Where rows of metrics.jsonl go besides: as they were written, and each step once, whatever kills a run."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import shutil
import sys
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lib import kconf
from lib.config import Config
from lib.errors import ConfigError, ToolkitError
from lib.runs import metrics
from lib.runs.console import Console
from lib.runs.directory import RunDir
from lib.runs.identity import identity
from lib.runs.sinks import EventFile, check_packages, open_sinks
from tests.support import event_files
from tests.support.configs import ROOT, make_config
from tests.support.event_files import read_events
from train import commands
from train.record import RunRecord

BEGAN = 1_925_697_906.0
TRAIN = {"kind": "train", "epoch": 0.5, "loss": 1.5, "samples_per_second": 100.0, "seconds": 2.5}
EVAL = {"kind": "eval", "epoch": 0.5, "samples": 10.0, "accuracy": 0.5}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    files = {"config": "CONFIG_X=y\n", "values": {"SEED": 1}}
    return RunDir.create(tmp_path, model="lenet5", identity="0123abcd", files=files)


@pytest.fixture(params=["stand-in", "package"])
def tensorboard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "stand-in":
        event_files.use_stand_in(monkeypatch)
    elif not event_files.INSTALLED:
        pytest.skip("the package tensorboard is not installed")


def config_with(*sinks: str) -> Config:
    chosen = {f"sink_{name}": name in sinks for name in ("tensorboard", "wandb", "trackio")}
    return make_config(**chosen, sink_project="puzzles")


def train(
    run: RunDir, config: Config, *, after: int, to: int, evaluate: tuple[int, ...] = (), done: bool
) -> None:
    """What the loop does with a record: rows of the steps that follow `after`, and some evaluations."""
    opening = functools.partial(open_sinks, config, run)
    with closing(RunRecord(run, Console(run.log), started=0.0, keep_last=1, open_sinks=opening)) as record:
        record.begin(after, None)
        for step in range(after + 1, to + 1):
            record.row(**TRAIN | {"step": step, "loss": 1 / step, "seconds": float(step)})
            if step in evaluate:
                record.row(**EVAL | {"step": step})
        if done:
            record.finish(to, seconds=1.0, result={"samples": 10.0}, part="test part")


def event_files_of(run: RunDir) -> list[Path]:
    return sorted(run.sinks.glob("*tfevents*"))


def values_of(tag: str, *files: Path) -> list[tuple[int, float]]:
    """As TensorBoard takes them: a session that starts at a step makes it forget that step and later ones."""
    found: list[tuple[int, float]] = []
    for event in (event for file in files for event in read_events(file)):
        if event.starts_session:
            found = [(step, value) for step, value in found if step < event.step]
        if tag in event.values:
            found.append((event.step, event.values[tag]))
    return found


# TensorBoard


@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.usefixtures("tensorboard")
def test_rows_become_events(tmp_path: Path) -> None:
    file = EventFile(tmp_path, began=BEGAN)
    note = {"note": "loss is nan", "loss": None}
    file.send([TRAIN | {"step": 300}, EVAL | {"step": 300}])
    file.send([TRAIN | note | {"step": 2**40, "seconds": 7.0}, EVAL | {"step": 2**40, "accuracy": 1e40}])
    file.close(done=True)
    version, start, *events = read_events(tmp_path / "events.out.tfevents.000001")
    assert version.file_version == "brain.Event:2" and version.wall_time == BEGAN
    assert start.starts_session and start.step == 0
    assert [event.step for event in events] == [300, 300, 2**40, 2**40]
    assert [event.wall_time - BEGAN for event in events] == [2.5, 2.5, 7.0, 7.0]
    assert events[0].values == pytest.approx(
        {
            "train/epoch": 0.5,
            "train/loss": 1.5,
            "train/samples_per_second": 100.0,
            "train/seconds": 2.5,
        }
    )
    assert events[1].values == {"eval/epoch": 0.5, "eval/samples": 10.0, "eval/accuracy": 0.5}
    assert "train/loss" not in events[2].values
    assert events[3].values["eval/accuracy"] >= 1e38, "infinite in single precision"


@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.usefixtures("tensorboard")
def test_a_run_that_goes_on_tells_no_step_twice(run: RunDir) -> None:
    config = config_with("tensorboard")
    train(run, config, after=0, to=5, evaluate=(4,), done=False)
    (first,) = event_files_of(run)
    assert values_of("train/loss", first)[-1] == (5, pytest.approx(0.2))
    train(run, config, after=3, to=6, evaluate=(4, 6), done=True)
    emptied, second = event_files_of(run)
    assert emptied == first and first.stat().st_size == 0
    rows = metrics.read(run.metrics)
    for kind, column in (("train", "loss"), ("eval", "accuracy")):
        told = [(row["step"], row[column]) for row in rows if row["kind"] == kind]
        assert values_of(f"{kind}/{column}", second) == [(step, pytest.approx(value)) for step, value in told]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert read_events(second)[2].wall_time == run.began + 1.0 > 0
    train(run, config, after=6, to=7, done=True)
    emptied, third = event_files_of(run)
    assert emptied == second and second.stat().st_size == 0
    assert [step for step, _ in values_of("train/loss", third)] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.usefixtures("tensorboard")
def test_a_run_killed_before_it_removed_the_earlier_file_is_read_once(run: RunDir) -> None:
    config = config_with("tensorboard")
    train(run, config, after=0, to=3, done=False)
    kept = run.path / "kept"
    shutil.copytree(run.sinks, kept)
    train(run, config, after=2, to=4, done=True)
    both = [*kept.iterdir(), event_files_of(run)[-1]]
    assert [step for step, _ in values_of("train/loss", *both)] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore")  # of the package
def test_the_package_of_tensorboard_reads_the_same(run: RunDir) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_with("tensorboard")
    train(run, config, after=0, to=5, done=False)
    live = EventAccumulator(str(run.sinks)).Reload()
    assert [event.step for event in live.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    train(run, config, after=3, to=6, evaluate=(6,), done=True)
    for reader in (live.Reload(), EventAccumulator(str(run.sinks)).Reload()):
        assert set(reader.Tags()["scalars"]) >= {"train/loss", "train/samples_per_second", "eval/accuracy"}
        found = [
            (event.step, event.wall_time - run.began, event.value) for event in reader.Scalars("train/loss")
        ]
        assert found == [(step, float(step), pytest.approx(1 / step)) for step in range(1, 7)]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event_files.use_stand_in(monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(ToolkitError, match=r"cannot write .*file.*: Not a directory"):
        EventFile(tmp_path / "file" / "folder", began=0.0)


# Packages of others


class Package(ModuleType):
    """Stands for wandb and for trackio, and remembers what it was told."""

    class Error(Exception):
        pass

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, origin="a test")
        self.rows: list[dict[str, Any]] = []
        self.opened: list[dict[str, Any]] = []
        self.finished: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.refuses = False

    def init(self, **named: Any) -> Package:
        if self.refuses:
            raise self.Error("api_key not\nconfigured")
        self.opened.append(named)
        return self

    def Settings(self, **named: Any) -> dict[str, Any]:
        return named

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float], **named: Any) -> None:
        self.rows.append({**values, **named})

    def finish(self, **named: Any) -> None:
        self.finished.append(named)


@pytest.fixture(params=["wandb", "trackio"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Package:
    stand_in = Package(request.param)
    monkeypatch.setitem(sys.modules, request.param, stand_in)
    return stand_in


def test_a_service_is_sent_each_row_once(run: RunDir, package: Package) -> None:
    config = config_with(package.__name__)
    check_packages(config)
    train(run, config, after=0, to=5, evaluate=(3,), done=False)
    train(run, config, after=3, to=4, done=False)
    train(run, config, after=4, to=7, evaluate=(5, 7), done=True)
    kinds = [("eval" if "eval/accuracy" in row else "train", row["step"]) for row in package.rows]
    assert kinds == [
        *(("train", step) for step in (1, 2, 3)),
        ("eval", 3),
        *(("train", step) for step in (4, 5)),
        ("eval", 5),  # of the last start: the first one did not get there
        *(("train", step) for step in (6, 7)),
        ("eval", 7),
    ]
    assert package.rows[0] == {"step": 1, **{f"train/{name}": value for name, value in numbers(TRAIN)}}
    names = {
        (opened["project"], opened["name"], opened["group"], opened["resume"]) for opened in package.opened
    }
    assert names == {("puzzles", run.name, "lenet5", "allow")}
    assert package.opened[0]["config"] == {"SEED": 1}


def numbers(row: dict[str, Any]) -> list[tuple[str, float]]:
    of_step_1 = row | {"loss": 1.0, "seconds": 1.0}
    return [(name, value) for name, value in of_step_1.items() if name != "kind"]


def test_weights_and_biases_counts_by_our_steps_and_knows_how_it_ended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = Package("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(run, config_with("wandb"), after=0, to=1, done=False)
    train(run, config_with("wandb"), after=1, to=2, done=True)
    assert wandb.axes[:2] == [("step", None), ("*", "step")]
    assert wandb.finished == [{"exit_code": 1}, {"exit_code": 0}]
    assert {(opened["id"], opened["dir"]) for opened in wandb.opened} == {(run.name, str(run.sinks))}
    wandb.refuses = True
    with pytest.raises(ToolkitError, match=r"cannot be used: api_key not configured; log in by wandb login"):
        train(run, config_with("wandb"), after=2, to=3, done=True)


def test_a_damaged_note_of_what_was_sent_is_told(run: RunDir, package: Package) -> None:
    config = config_with(package.__name__)
    train(run, config, after=0, to=1, done=False)
    (run.sinks / f"{package.__name__}.json").write_text("[1")
    with pytest.raises(ToolkitError, match=rf"{package.__name__}\.json is damaged"):
        train(run, config, after=1, to=2, done=True)


@pytest.mark.parametrize(
    ("name", "other"), [("wandb", "trackio"), ("trackio", "wandb"), ("tensorboard", "wandb")]
)
def test_a_package_that_is_missing_is_named_before_anything_is_done(
    name: str, other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed = rf"CONFIG_SINK_{name.upper()}=y needs it; install the extra {name}, for example"
    told = f"the package {name} is not installed: {needed}"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=told):
            check_packages(config_with(name))
        patch.setitem(sys.modules, other, Package(other))
        check_packages(config_with(other))
    if importlib.util.find_spec(name) is None:
        (tmp_path / name).mkdir()  # what wandb leaves behind where it runs
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match=told):
            check_packages(config_with(name))


def test_training_asks_for_the_package_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".config").write_text("CONFIG_SINK_TRACKIO=y\n")
    monkeypatch.setenv("KCONFIG_CONFIG", str(tmp_path / ".config"))
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="the package trackio is not installed"):
        commands.train(kconf.from_environment(ROOT), root=ROOT, runs=tmp_path / "runs", started=0.0)
    assert not (tmp_path / "runs").exists()


# Off


def test_what_is_off_costs_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("tensorboard", "wandb", "trackio")
    for name in packages:
        monkeypatch.delitem(sys.modules, name, raising=False)
    unread = "metrics.jsonl was read for nobody"
    monkeypatch.setattr(metrics.Follower, "batches", lambda _: pytest.fail(unread))
    train(run, config_with(), after=0, to=3, evaluate=(2,), done=True)
    assert not run.sinks.exists() and not set(packages) & set(sys.modules)


def test_sinks_are_no_part_of_what_a_run_is() -> None:
    values = {"SEED": 1, "SINK_TENSORBOARD": False, "SINK_PROJECT": None}
    assert identity(values) == identity(values | {"SINK_TENSORBOARD": True, "SINK_PROJECT": "x"})


def test_every_sink_is_closed_even_if_one_fails(run: RunDir) -> None:
    closed: list[bool] = []
    calls = itertools.count()

    class Failing:
        def send(self, rows: object) -> None:  # noqa: ARG002
            if next(calls) == 2:
                raise ToolkitError("cannot send")

        def close(self, *, done: bool) -> None:
            closed.append(done)

    record = RunRecord(
        run, Console(run.log), started=0.0, keep_last=1, open_sinks=lambda: [Failing(), Failing()]
    )
    record.begin(0, None)
    with pytest.raises(ToolkitError, match="cannot send"):
        record.close()
    assert closed == [False, False]


def test_a_run_that_was_removed_is_told_by_its_own_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    event_files.use_stand_in(monkeypatch)
    opening = functools.partial(open_sinks, config_with("tensorboard"), run)
    record = RunRecord(run, Console(run.log), started=0.0, keep_last=1, open_sinks=opening)
    record.begin(0, None)
    shutil.rmtree(run.path)
    with pytest.raises(ToolkitError, match="is gone: it was removed while"):
        record.row(**EVAL | {"step": 1})
    record.close()
