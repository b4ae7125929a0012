"""Runs on storage: whole checkpoints or none, whatever is cut off, damaged or removed meanwhile."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lib import checkpoint, metrics
from lib.config import Config, identity
from lib.console import Console
from lib.errors import CheckpointError, ConfigError, ToolkitError
from lib.remote_run import RemoteRun, contents
from lib.rundir import RunDir, checkpoint_name
from lib.storage import Storage, StorageError, open_storage
from tests.configs import make_config
from train.record import RunRecord
from train.remote import Copier, catch_up, check_storage, interrupted

HASH = "0123abcd"
URL = "memory://bucket"
PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power is cut here
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def config(url: str = URL, **changes: Any) -> Config:
    return make_config("lenet5", checkpoint_url=url, **changes)


def a_run(runs: Path) -> RunDir:
    return RunDir.create(runs, model="lenet5", identity=HASH, files={"config": "x=1\n", "plan": {"a": 1}})


def save(run: RunDir, step: int, *, best: bool = False, keep_last: int = 3, value: float = 0.0) -> None:
    state = {"a": torch.full((50,), value or float(step))}
    checkpoint.save(run.checkpoints, step=step, state=state, keep_last=keep_last, best=best)


def remote_of(run: RunDir, storage: Storage | None = None) -> RemoteRun:
    whole = storage or open_storage(URL, asked="X")
    return RemoteRun(run.name, whole.below(f"lenet5/{run.name}"))


def copy(run: RunDir, *, keep_last: int = 3) -> None:
    remote_of(run).copy(run.checkpoints, contents(run), keep_last=keep_last)


def there(run: RunDir) -> list[int]:
    return sorted(remote_of(run).manifests())


def found_again(runs: Path, said: list[str] | None = None) -> RunDir:
    say = print if said is None else said.append
    run = interrupted(config(), identity=HASH, runs=runs, say=say)
    assert run is not None
    return run


def newest(run: RunDir) -> tuple[int, float]:
    found = checkpoint.load(run.checkpoints, say=print)
    assert found is not None
    return found[0], float(found[1]["a"][0])


def damage(run: RunDir, step: int, name: str = "state.pt") -> None:
    storage, place = open_storage(URL, asked="X"), f"lenet5/{run.name}/ckpt/{checkpoint_name(step)}/{name}"
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
    open_storage(URL, asked="X").remove(f"lenet5/{run.name}/ckpt/step-00000003/state.pt")
    said: list[str] = []
    assert newest(found_again(tmp_path / "two", said)) == (2, 2.0)
    where = f"{URL}/lenet5/{run.name}"
    assert said == [
        f"checkpoint step-00000004 in {where} is damaged: the SHA-256 of state.pt differs",
        f"checkpoint step-00000003 in {where} is damaged: state.pt is missing",
        f"Checkpoint step-00000002 comes from {where}",
    ]


def test_where_all_are_damaged_nothing_begins_in_silence(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    save(run, 1)
    copy(run)
    run.release()
    damage(run, 1)
    for _ in range(2):  # the first attempt is not in the way of the second
        with pytest.raises(CheckpointError, match="no sound checkpoint in memory://bucket/lenet5/"):
            found_again(tmp_path / "two")
    damage(run, 1, "manifest.json")
    assert interrupted(config(), identity=HASH, runs=tmp_path / "two", say=print) is None


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
    catch_up(again, config(), say=print)
    with pytest.raises(TypeError):
        found_again(tmp_path / "empty")


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
    assert newest(catch_up(found_again(tmp_path / "one"), config(), say=print)) == (2, 2.0)
    assert [row["step"] for row in metrics.read(run.metrics)] == [1, 2]


def test_a_run_that_is_done_or_in_use_is_not_taken_up_again(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    save(run, 1)
    copy(run)
    look = {"identity": HASH, "runs": tmp_path / "one", "say": print}
    assert interrupted(config(), **look) is None, "in use by this process"
    run.release()
    assert interrupted(config(), **look | {"identity": "ffffffff"}) is None
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


# Beside training

put = MemoryFileSystem.pipe_file


class Bucket:
    """What storage does with what is written to it, one file after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.opened, self.asked = False, threading.Event(), threading.Event()
        self.opened.set()
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *arguments: self._put(*arguments))

    def _put(self, files: MemoryFileSystem, path: str, data: bytes) -> None:
        self.asked.set()
        assert self.opened.wait(PATIENCE_SECONDS)
        if self.is_full:
            raise OSError(28, "No space left on device")
        put(files, path, data)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    return Bucket(monkeypatch)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[RunRecord]:
    run = a_run(tmp_path)
    copier = Copier(run, config(keep_last=2))
    with closing(RunRecord(run, Console(run.log), started=0.0, keep_last=2, copier=copier)) as begun:
        begun.begin(0, 10)
        yield begun


def keep(record: RunRecord, step: int) -> None:
    record.save(step, {"a": torch.full((50,), float(step))}, best=False)


def log(record: RunRecord) -> list[str]:
    return [line.partition(" ")[2] for line in record.run.log.read_text().splitlines()]


def copier_of(record: RunRecord) -> Copier:
    assert record._copier is not None
    return record._copier


def test_training_does_not_wait_and_what_is_newest_is_copied(record: RunRecord, held: Bucket) -> None:
    held.opened.clear()
    keep(record, 1)
    assert held.asked.wait(PATIENCE_SECONDS)
    for step in (2, 3, 4, 5):  # the disk keeps two, and 1 is not there any more
        keep(record, step)
    assert there(record.run) == []
    held.opened.set()
    record.finish(5, seconds=1.0, result={"samples": 1.0, "loss": 0.5}, part="test part")
    assert there(record.run) in ([5], [1, 5]), "2 to 4 were passed over"
    assert remote_of(record.run).is_done()
    assert log(record)[-2:] == [
        f"Copied to {URL}/lenet5/{record.run.name}",
        f"Run: {record.run.path}",
    ]


def test_a_failed_copy_is_told_once_and_the_next_checkpoint_tries_again(
    record: RunRecord, held: Bucket
) -> None:
    held.is_full = True
    for step in (1, 2):
        keep(record, step)
        assert "No space left on device" in copier_of(record).wait(print)
        record.progress(step, 0.1)
    where = f"{URL}/lenet5/{record.run.name}"
    failed = f"Not copied to {where}, which the next checkpoint tries again: cannot write {where}/"
    assert sum(line.startswith(failed) for line in log(record)) == 1
    held.is_full = False
    keep(record, 3)
    assert copier_of(record).wait(print) == ""
    record.progress(3, 0.1)
    assert there(record.run) == [3] and log(record)[-1] == f"Copied to {where} again"


def test_a_run_whose_end_is_not_on_storage_does_not_end_well(record: RunRecord, held: Bucket) -> None:
    keep(record, 1)
    assert copier_of(record).wait(print) == ""
    held.is_full = True
    keep(record, 2)
    with pytest.raises(ToolkitError, match=r"the newest checkpoint is not in .*No space.*copy it by hand"):
        record.finish(2, seconds=1.0, result={"samples": 1.0, "loss": 0.5}, part="test part")
    assert record.run.status().state == "done" and there(record.run) == [1]
    assert not remote_of(record.run).is_done()
    record.broken_off()
    assert "The newest checkpoint is not" not in record.run.log.read_text(), "told twice"


def test_a_run_that_is_stopped_waits_for_its_copy_and_says_where_it_is_not(
    record: RunRecord, held: Bucket
) -> None:
    held.opened.clear()
    keep(record, 1)
    record.run.set_status("preempted", step=1)
    threading.Timer(0.05, held.opened.set).start()
    record.broken_off()
    assert there(record.run) == [1]
    assert b"preempted" in remote_of(record.run).storage.read("status.json")
    held.is_full = True
    keep(record, 2)
    record.broken_off()
    assert log(record)[-1].startswith(f"The newest checkpoint is not in {URL}/lenet5/")


def test_a_first_signal_does_not_cut_the_last_copy_off(record: RunRecord, held: Bucket) -> None:
    keep(record, 1)
    assert copier_of(record).wait(print) == ""
    held.opened.clear()
    held.asked.clear()

    def signal_then_open() -> None:
        assert held.asked.wait(PATIENCE_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        held.opened.set()

    sender = threading.Thread(target=signal_then_open)
    sender.start()
    record.finish(1, seconds=1.0, result={"samples": 1.0, "loss": 0.5}, part="test part")
    sender.join()
    assert remote_of(record.run).is_done()


def test_a_checkpoint_that_the_disk_gave_up_meanwhile_is_no_failure(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Storage.upload

    def late(storage: Storage, path: Path, name: str) -> None:
        shutil.rmtree(path.parent)
        upload(storage, path, name)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "upload", late)
        keep(record, 1)
        assert copier_of(record).wait(print) == "the copy was broken off"
    assert copier_of(record).news() == []
    keep(record, 2)
    assert copier_of(record).wait(print) == "" and there(record.run) == [2]


def test_a_mistake_of_ours_is_no_copy(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "copy", None)
        keep(record, 1)
        assert copier_of(record).wait(print) == "the copy was broken off"
    keep(record, 2)
    assert copier_of(record).wait(print) == "" and there(record.run) == [2]


def test_storage_is_tried_before_anything_is_spent(held: Bucket) -> None:
    check_storage(config(""))
    check_storage(config())
    held.is_full = True
    told = 'CONFIG_CHECKPOINT_URL="memory://bucket" cannot be used: cannot write memory://bucket/.check-'
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_storage(config())
    with pytest.raises(ConfigError, match="Protocol not known"):
        check_storage(config("nothing://x"))


def test_where_it_is_copied_to_is_not_part_of_the_identity() -> None:
    values: dict[str, Any] = {"SEED": 1}
    assert identity(values) == identity(values | {"CHECKPOINT_URL": URL})
