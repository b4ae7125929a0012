"""Runs on storage: whole checkpoints or none, whatever is cut off, damaged or removed meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lib.errors import CheckpointError
from lib.runs import checkpoint, metrics
from lib.runs.directory import RunDir, checkpoint_name
from lib.runs.remote import RemoteRun, contents
from lib.runs.storage import Storage, StorageError, open_storage
from tests.support.remote import ASKED, HASH, URL, a_run, clean_bucket, config, copy, remote_of, save, there
from train.upload import catch_up, interrupted


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with clean_bucket(monkeypatch):
        yield


def found_again(runs: Path, said: list[str] | None = None) -> RunDir:
    log = print if said is None else said.append
    run = interrupted(config(), ASKED, runs=runs, log=log)
    assert run is not None
    return run


def newest(run: RunDir) -> tuple[int, float]:
    found = checkpoint.load(run.checkpoints, log=print)
    assert found is not None
    return found[0], float(found[1]["a"][0])


def damage(run: RunDir, step: int, name: str = "state.pt") -> None:
    storage, place = (
        open_storage(URL, requested="X"),
        f"lenet5/{run.name}/ckpt/{checkpoint_name(step)}/{name}",
    )
    data = storage.read(place)
    storage.write(place, data[:200] + bytes([data[200] ^ 1]) + data[201:])


# The order of things, and what is kept


@dataclasses.dataclass(frozen=True, slots=True)
class Cut(Storage):
    """Breaks off at the change after so many, and remembers them all. What is large may be there in half."""

    changes: list[str] = dataclasses.field(default_factory=list)
    at: int = 1000

    def write(self, name: str, data: bytes) -> None:
        if len(self.changes) < self.at:
            Storage.write(self, name, data)
        elif name.endswith("manifest.json"):  # storage that cannot do it at once
            Storage.write(self, name, data[: len(data) // 2])
        self._count(name)

    def upload(self, path: Path, name: str) -> None:
        if len(self.changes) == self.at:
            Storage.write(self, name, path.read_bytes()[:100])
        else:
            Storage.upload(self, path, name)
        self._count(name)

    def remove(self, name: str) -> None:
        if len(self.changes) < self.at:
            Storage.remove(self, name)
        self._count(f"- {name}")

    def _count(self, change: str) -> None:
        self.changes.append(change)
        if len(self.changes) > self.at:
            raise StorageError("cut off")


def cut_copy(run: RunDir, at: int) -> list[str] | None:
    """Copy `run`, broken off at a change; None if it was, else all changes that were made."""
    plain = remote_of(run).storage
    cut = Cut(plain.url, plain._files, plain._root, plain._on_disk, at=at)
    try:
        RemoteRun(run.name, cut).copy(run.checkpoints, contents(run), keep_last=2)
    except StorageError:
        return None
    return cut.changes


def test_a_copy_that_is_cut_off_anywhere_leaves_whole_checkpoints(tmp_path: Path) -> None:
    for at in range(100):
        MemoryFileSystem.store.clear()
        run = a_run(tmp_path / str(at))
        for step in (1, 2, 3):
            save(run, step, best=step == 1)
            copy(run, keep_last=2)
        save(run, 3, value=30.0)  # in the place of another one of that step
        save(run, 4)
        changes = cut_copy(run, at)
        run.release()
        elsewhere = found_again(tmp_path / f"{at}-elsewhere")
        step, value = newest(elsewhere)
        assert step in (3, 4) and value == step and elsewhere.read_json("plan") == {"a": 1}, at
        elsewhere.release()
        copy(run, keep_last=2)
        assert there(run) == [1, 3, 4], "the next copy has not put it in order"
        if changes is not None:
            break
    assert changes is not None and at > 5
    order = ["ckpt/step-00000004/state.pt", "config", "plan.json"]
    order += ["ckpt/step-00000004/manifest.json", "status.json"]
    assert sorted(order, key=changes.index) == order
    assert changes[changes.index("status.json") + 1 :] == [
        "- ckpt/step-00000002/manifest.json",
        "- ckpt/step-00000002",
    ]


def test_a_replaced_checkpoint_is_none_until_it_is_whole(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    save(run, 1)
    copy(run)
    save(run, 1, value=5.0)
    assert cut_copy(run, at=1) is None
    assert there(run) == []
    copy(run)
    run.release()
    assert newest(found_again(tmp_path / "elsewhere")) == (1, 5.0)


def test_what_is_kept_is_decided_by_what_is_there(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    for step in (1, 2, 3, 4):
        save(run, step, best=step == 1)
        copy(run)
    assert there(run) == [1, 2, 3, 4]
    run.release()
    second = found_again(tmp_path / "two")
    assert checkpoint.steps(second.checkpoints) == [1, 4], "the best one, too"
    assert checkpoint.best_step(second.checkpoints) == 1
    save(second, 5)
    copy(second)
    assert there(run) == [1, 3, 4, 5], "those that this machine never had are kept as long"
    save(second, 6, best=True)
    copy(second)
    assert there(run) == [4, 5, 6], "the best of before has become an old one"
    second.release()
    third = found_again(tmp_path / "three")
    assert checkpoint.steps(third.checkpoints) == [6] and checkpoint.best_step(third.checkpoints) == 6


def test_a_course_that_was_given_up_is_dropped(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    for step in (2, 4):
        save(run, step)
        copy(run)
    save(run, 3)
    copy(run)
    assert there(run) == [2, 3]


# Going on elsewhere


def test_a_damaged_one_is_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    for step in (1, 2, 3, 4):
        save(run, step, best=step == 2)
        copy(run)
    run.release()
    damage(run, 4)
    open_storage(URL, requested="X").remove(f"lenet5/{run.name}/ckpt/step-00000003/state.pt")
    said: list[str] = []
    assert newest(found_again(tmp_path / "two", said)) == (2, 2.0)
    where = f"{URL}/lenet5/{run.name}"
    assert said == [
        f"warning: checkpoint step-00000004 in {where} is damaged: the SHA-256 of state.pt differs",
        f"warning: checkpoint step-00000003 in {where} is damaged: state.pt is missing",
        f"Checkpoint step-00000002 comes from {where}",
    ]


def test_where_all_are_damaged_nothing_begins_in_silence(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    save(run, 1)
    copy(run)
    run.release()
    damage(run, 1)
    for _ in range(2):  # the first attempt is not in the way of the second
        with pytest.raises(CheckpointError, match="no valid checkpoint in memory://bucket/lenet5/"):
            found_again(tmp_path / "two")
    damage(run, 1, "manifest.json")
    assert interrupted(config(), ASKED, runs=tmp_path / "two", log=print) is None


def test_a_disk_that_has_as_new_a_checkpoint_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path)
    save(run, 1)
    copy(run)
    run.release()
    monkeypatch.setattr(Storage, "download", None)
    again = found_again(tmp_path)
    assert again.path == run.path and newest(again) == (1, 1.0)
    catch_up(again, config(), log=print)
    with pytest.raises(TypeError):
        found_again(tmp_path / "empty")


def spoil(run: RunDir, step: int, *, how: str) -> None:
    """Damage a checkpoint on the disk."""
    folder = run.checkpoints / checkpoint_name(step)
    if how == "no manifest":
        (folder / "manifest.json").unlink()
        return
    path = folder / "state.pt"
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])


@pytest.mark.parametrize("how", ["another byte", "no manifest"])
@pytest.mark.parametrize("gone", [[3], [2, 3], [1, 2, 3]])
def test_what_is_damaged_on_the_disk_comes_from_storage(gone: list[int], how: str, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    for step in (1, 2, 3):
        save(run, step)
        copy(run)
    run.release()
    for step in gone:
        spoil(run, step, how=how)
    said: list[str] = []
    again = found_again(tmp_path, said)
    assert again.path == run.path and newest(again) == (3, 3.0)
    where = f"{URL}/lenet5/{run.name}"
    assert said == [f"Checkpoint step-00000003 comes from {where}, because the latest local one is damaged"]


def test_what_is_damaged_in_both_places_is_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    for step in (1, 2):
        save(run, step)
        copy(run)
    save(run, 3)  # that was never copied
    run.release()
    damage(run, 2)
    for step in (2, 3):
        spoil(run, step, how="another byte")
    said: list[str] = []
    again = found_again(tmp_path, said)
    found = checkpoint.load(again.checkpoints, log=said.append)
    assert found is not None and found[0] == 1
    assert [line.removeprefix("warning: ").split(":")[0].partition(" is ")[0] for line in said] == [
        f"checkpoint step-00000002 in {URL}/lenet5/{run.name}".split(":")[0],
        "checkpoint step-00000003",
        "checkpoint step-00000002",
    ]
    again.release()
    damage(run, 1)
    spoil(run, 1, how="another byte")
    with pytest.raises(CheckpointError, match="no valid checkpoint in memory://bucket/lenet5/"):
        found_again(tmp_path)


def test_a_run_that_went_further_elsewhere_is_caught_up_with(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    run.metrics.write_text('{"step": 1}\n')
    save(run, 1)
    copy(run)
    run.release()
    second = found_again(tmp_path / "two")
    second.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    save(second, 2)
    second.set_status("done", step=2)
    copy(second)
    assert newest(catch_up(found_again(tmp_path / "one"), config(), log=print)) == (2, 2.0)
    assert [row["step"] for row in metrics.read(run.metrics)] == [1, 2]


def test_a_run_that_is_done_or_in_use_is_not_taken_up_again(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    save(run, 1)
    copy(run)
    look = {"resolved": ASKED, "runs": tmp_path / "one", "log": print}
    assert interrupted(config(), **look) is None, "in use by this process"
    run.release()
    assert interrupted(config(), **look | {"resolved": replace(ASKED, in_effect={})}) is None
    run.set_status("done", step=1)
    assert interrupted(config(), **look) is None, "done here, whatever storage was told"
    elsewhere = look | {"runs": tmp_path / "two"}
    assert interrupted(config(""), **elsewhere) is None
    copy(run)
    assert interrupted(config(), **elsewhere) is None, "done"


def test_the_run_that_is_further_is_taken(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    save(run, 5)
    copy(run)
    run.release()
    here = a_run(tmp_path / "two")
    here.path = here.path.rename(here.path.with_name(f"20200101T000000Z-{HASH}"))
    save(here, 5)
    here.release()
    same = found_again(tmp_path / "two")
    assert same.path == here.path
    same.release()
    save(run, 6)
    copy(run)
    assert found_again(tmp_path / "two").name == run.name
    here.lock()  # nobody holds it
