"""The index of runs: rows that are never older than their runs, filters and orders."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ConfigError, ToolkitError
from lib.runs import index
from lib.runs.directory import RunDir, resolve_run
from lib.runs.index import Row, read_runs, select, sort
from lib.units import aligned
from scripts.runs import columns


def make_run(
    folder: Path, number: int, *, model: str = "lenet5", state: Any = "done", **values: Any
) -> RunDir:
    """A run with two evaluations, the first of which is the better one."""
    values = {"DATASET": "digits", "LEARNING_RATE": 0.1, "OPTIMIZER": "sgd", **values}
    run = RunDir.create(
        folder,
        model=model,
        identity=f"{number:08x}",
        files={"config": "", "values": values, "plan": {"effective_batch": 64}, "data": {}},
    )
    rows = [{"kind": "train", "step": 1, "loss": 1.0}]
    rows += [
        {"kind": "eval", "step": step, "accuracy": accuracy, "loss": 1 - accuracy}
        for step, accuracy in ((10, 0.9 + number / 1000), (20, 0.8))
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.set_status(state, step=20, seconds=61.0, accuracy=0.8, loss=0.2 + number)
    run.release()
    return run


def settle(run: RunDir) -> None:
    """Let the run be older than what an index must not trust."""
    past = run.path.stat().st_mtime_ns - 10 * index._CLOCK_NS
    for path in (*run.path.iterdir(), run.path):
        os.utime(path, ns=(past, past))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs that are read from now on."""
    names: list[str] = []
    original = index.read_row

    def read(run: RunDir, name: str) -> Row:
        names.append(name)
        return original(run, name)

    monkeypatch.setattr(index, "read_row", read)
    return names


def test_a_row_is_what_the_run_says(tmp_path: Path) -> None:
    run = make_run(tmp_path, 7)
    run.tag(["baseline", "paper:table-1"])
    (row,) = read_runs(tmp_path)
    assert row.run == f"lenet5/{run.name}" and row.identity == "00000007" and row.state == "done"
    assert (row.model, row.data, row.effective_batch, row.step) == ("lenet5", "digits", 64, 20)
    assert (row.metric, row.best, row.best_step) == ("accuracy", pytest.approx(0.907), 10)
    assert row.metrics == {"accuracy": 0.8, "loss": 7.2} and row.seconds == 61.0
    assert row.tags == ("baseline", "paper:table-1") and row.value("lr") == 0.1


def test_what_has_not_changed_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path, number, GONE=number) for number in range(3)]
    for run in runs:
        settle(run)
    first = read_runs(tmp_path)
    names = counted(monkeypatch)
    assert read_runs(tmp_path) == first and names == []
    assert [row.values["GONE"] for row in sort(first, "identity")] == [0, 1, 2]


@pytest.mark.parametrize("change", ["status", "tag"])
def test_a_run_that_has_changed_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    runs = [make_run(tmp_path, number) for number in range(2)]
    for run in runs:
        settle(run)
    read_runs(tmp_path)
    names = counted(monkeypatch)
    if change == "status":
        runs[1].set_status("failed", step=21)
    else:
        runs[1].tag(["new"])
    row = next(row for row in read_runs(tmp_path) if row.identity == "00000001")
    assert names == [row.run]
    assert row.state == "failed" if change == "status" else row.tags == ("new",)


@pytest.mark.parametrize("keeps", ["size", "time"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json"])
def test_a_file_that_is_changed_in_place_is_read_again(tmp_path: Path, name: str, keeps: str) -> None:
    run = make_run(tmp_path, 0)
    settle(run)
    assert not read_runs(tmp_path)[0].damaged
    file = run.path / name
    before, text = file.stat(), file.read_bytes()
    file.write_bytes(text[:-4] + b"x}}\n" if keeps == "size" else text + b"nonsense\n")
    if keeps == "time":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        (damaged,) = read_runs(tmp_path)[0].damaged
        assert damaged.partition(":")[0] == name


@pytest.mark.parametrize("content", ["", "[", None])
def test_a_status_that_cannot_be_read_is_damage(tmp_path: Path, content: str | None) -> None:
    run = make_run(tmp_path, 0)
    settle(run)
    read_runs(tmp_path)
    (run.path / "status.json").unlink() if content is None else (run.path / "status.json").write_text(content)
    for _ in range(2):
        (row,) = read_runs(tmp_path)
        assert (row.state, row.damaged) == ("unknown", ("status.json",))
        assert "10/?" in aligned(columns([row]))[1]


def test_a_change_in_the_moment_of_the_index_is_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0)
    read_runs(tmp_path)
    before = run.path.stat()
    run.set_status("failed", step=21)
    os.utime(run.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # a clock with coarse ticks
    assert read_runs(tmp_path)[0].state == "failed"


def test_a_running_run_is_always_read(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0, state="running")
    run.lock()
    settle(run)
    assert read_runs(tmp_path)[0].state == "running"
    with run.metrics.open("a") as file:
        file.write('{"kind": "eval", "step": 30, "accuracy": 0.99}\n')
    assert read_runs(tmp_path)[0].best_step == 30
    run.release()
    assert read_runs(tmp_path)[0].state == "killed", "no process holds it"
    run.lock()
    assert read_runs(tmp_path)[0].state == "running", "it was resumed"


def test_a_removed_run_and_a_damaged_index_leave_nothing_behind(tmp_path: Path) -> None:
    make_run(tmp_path, 0)
    gone = make_run(tmp_path, 1)
    read_runs(tmp_path)
    gone.path.rename(tmp_path / "elsewhere")
    assert [row.identity for row in read_runs(tmp_path)] == ["00000000"]
    (tmp_path / index.INDEX).write_text('{"version": 1, "runs": {"a": 1}}')
    assert [row.identity for row in read_runs(tmp_path)] == ["00000000"]


def test_runs_of_sweeps_are_found_and_leftovers_are_not(tmp_path: Path) -> None:
    make_run(tmp_path / "sweeps" / "lr" / "0123abcd", 0)
    (tmp_path / "lenet5" / ".new-0123").mkdir(parents=True)
    (tmp_path / "lenet5" / "notes").mkdir()
    assert [row.run.split("/")[:3] for row in read_runs(tmp_path)] == [["sweeps", "lr", "0123abcd"]]


def test_links_to_directories_are_followed_and_each_run_is_found_once(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    run, other = make_run(runs, 1), make_run(elsewhere, 2, model="gpt2")
    (runs / "gpt2").symlink_to(elsewhere / "gpt2")
    (runs / "a").symlink_to(runs / "lenet5")  # the name comes first, and the run has a place of its own
    (runs / "lenet5" / "loop").symlink_to(runs)
    (runs / "itself").symlink_to(runs / "itself")
    (runs / "gone").symlink_to(tmp_path / "gone")
    (runs / "file").symlink_to(run.metrics)
    assert sorted(row.run for row in read_runs(runs)) == [f"gpt2/{other.name}", f"lenet5/{run.name}"]


def test_a_folder_that_may_not_be_listed_is_left_out_with_one_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, scandir, iterdir = make_run(tmp_path, 1), os.scandir, Path.iterdir
    (tmp_path / "lost+found").mkdir()

    def refuse(path: Path) -> None:
        if Path(path).name in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) or scandir(path))
    monkeypatch.setattr(Path, "iterdir", lambda path: refuse(path) or iterdir(path))
    refused = {"lost+found"}
    for _ in range(2):
        assert [row.run for row in read_runs(tmp_path)] == [f"lenet5/{run.name}"]
        assert resolve_run(tmp_path).name == run.name
    assert capsys.readouterr().err == f"note: {tmp_path / 'lost+found'} is left out: permission denied\n"
    refused = {tmp_path.name}
    with pytest.raises(PermissionError):
        read_runs(tmp_path)
    with pytest.raises(ToolkitError, match="cannot list"):
        resolve_run(tmp_path)


def test_no_folder_is_no_run(tmp_path: Path) -> None:
    assert read_runs(tmp_path / "none") == []


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    make_run(tmp_path, 1, LEARNING_RATE=0.1)
    make_run(tmp_path, 2, LEARNING_RATE=0.001, NESTEROV=True).tag(["old"])
    make_run(tmp_path, 3, model="gpt2", state="failed")
    return read_runs(tmp_path)


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("", "123"),
        ("model=lenet5", "12"),
        ("model=l*", "12"),
        ("model!=lenet5", "3"),
        ("lr>0.01", "13"),
        ("lr<=1e-3", "2"),
        ("CONFIG_LEARNING_RATE=0.1", "13"),
        ("learning_rate=0.1 state=done", "1"),
        ("nesterov=y", "2"),
        ("tags=old", "2"),
        ("tags!=old", "13"),
        ("accuracy>=0.902", "23"),
        ("batch=64 step=20", "123"),
    ],
)
def test_conditions(rows: list[Row], where: str, numbers: str) -> None:
    assert "".join(sorted(row.identity[-1] for row in select(rows, where))) == numbers


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("model", "model is not a condition"),
        ("lr > 1", "lr is not a condition; write KEY=VALUE, KEY>VALUE or the like, without spaces"),
        ("lrr=1", "no run has a value called lrr; did you mean lr"),
        ("modle=gpt2", "did you mean model"),
        ("zzz=1", "called zzz; make runs LIMIT=1 JSON=1 shows what a run has"),
    ],
)
def test_a_condition_that_can_select_nothing_is_refused(rows: list[Row], where: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(rows, where)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("key", "numbers"),
    [
        ("accuracy", "321"),
        ("-accuracy", "123"),
        ("loss", "123"),
        ("model", "312"),
        ("lr", "132"),
        ("nesterov", "213"),
    ],
)
def test_orders(rows: list[Row], key: str, numbers: str) -> None:
    by_identity = sorted(rows, key=lambda row: row.identity)
    assert "".join(row.identity[-1] for row in sort(by_identity, key)) == numbers


def test_the_best_value_of_a_loss_is_the_smallest(tmp_path: Path) -> None:
    for number in range(4):
        make_run(tmp_path, number, BEST_METRIC="loss" if number < 3 else "accuracy")
    rows = sorted(read_runs(tmp_path), key=lambda row: row.identity)
    bests = (0.3, 0.1, 0.2, 0.9)
    by_identity = [dataclasses.replace(row, best=best) for row, best in zip(rows, bests, strict=True)]
    assert [row.best for row in sort(by_identity[:3], "best")] == [0.1, 0.2, 0.3]
    assert [row.best for row in sort(by_identity[:3], "-best")] == [0.3, 0.2, 0.1]
    assert [row.best for row in sort(by_identity, "best")] == [0.9, 0.1, 0.2, 0.3], "metrics apart"


def test_tags_are_words(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0)
    assert run.tag(["b", "a"]) == ["a", "b"]
    assert run.tag(["-a", "c"]) == ["b", "c"] == run.tags()
    with pytest.raises(ConfigError, match="is not a tag"):
        run.tag(["a,b"])


def test_a_damaged_line_of_metrics_is_named_and_the_rows_after_it_count(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0, state="failed")
    rows = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join([rows[0], '{"kind": "eval", "st\n', *rows[1:], '{"kind": "ev']))
    (row,) = read_runs(tmp_path)
    assert row.damaged == ("metrics.jsonl:2",) and (row.best, row.best_step) == (0.9, 10)
    for state, damaged in (("failed", ()), ("done", ("metrics.jsonl:3",))):  # a last line that is not whole
        run.metrics.write_text("".join(rows)[:-5])
        run.set_status(state, step=20)
        (row,) = read_runs(tmp_path)
        assert row.damaged == damaged and row.best == 0.9
    run.metrics.write_text("".join(rows) + "\0\0\0\n")
    run.set_status("done", step=20)
    (row,) = read_runs(tmp_path)
    assert row.damaged == ("metrics.jsonl:4",) and row.best == 0.9
    assert json.loads((tmp_path / index.INDEX).read_text())["runs"][row.run]["row"]["damaged"]


def test_every_column_of_one_word_is_a_key(tmp_path: Path) -> None:
    make_run(tmp_path, 0)
    rows = read_runs(tmp_path)
    heads = [head for head, *_ in columns(rows) if len(head.split()) == 1]
    assert {"model", "batch", "time", "best", "run"} <= {*heads}
    for head in heads:
        assert sort(rows, head) == rows


@pytest.mark.parametrize("name", ["values", "plan", "data", "tags"])
@pytest.mark.parametrize("content", ["", "3", "{", "\xff"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(tmp_path: Path, name: str, content: str) -> None:
    run = make_run(tmp_path, 0)
    run.tag(["old"])
    (run.path / f"{name}.json").write_bytes(content.encode("latin-1"))
    (row,) = read_runs(tmp_path)
    assert row.damaged == (f"{name}.json",) and row.best == 0.9 and row.state == "done"
    assert bool(row.values) == (name != "values") and row.to_json()["damaged"] == row.damaged
    assert select([row], f"damaged={name}.json") == [row]
    assert any(line.endswith(f"{name}.json") for line in aligned(columns([row])))
    whole = dataclasses.replace(row, damaged=())
    assert select([whole, row], "damaged=*") == [row] and "damaged" not in aligned(columns([whole]))[0]


@pytest.mark.parametrize("name", ["status.json", "lock", "tags.json", "metrics.jsonl"])
def test_a_file_that_cannot_be_read_hides_no_other_run(tmp_path: Path, name: str) -> None:
    """A directory in place of the file, which no user can read as one."""
    make_run(tmp_path, 0)
    run = make_run(tmp_path, 1, state="running")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).mkdir()
    settle(run)
    for _ in range(2):  # from the run and from the index
        rows = {row.identity: row for row in read_runs(tmp_path)}
        assert rows["00000000"].state == "done" and not rows["00000000"].damaged
        assert rows["00000001"].damaged == (name,) and rows["00000001"].effective_batch == 64
    state = {"status.json": "unknown", "lock": "running"}.get(name, "killed")
    assert rows["00000001"].state == state
    if name == "status.json":
        (run.path / name).rmdir()
        run.set_status("done", step=3)
        settle(run)
        assert {row.state for row in read_runs(tmp_path)} == {"done"}, "it is read again"
