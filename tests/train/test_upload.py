"""Copying beside training: who waits for what, and what is told where storage fails."""

from __future__ import annotations

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

from lib.errors import ConfigError, ToolkitError
from lib.runs import checkpoint
from lib.runs.console import Console
from lib.runs.identity import identity
from lib.runs.remote import RemoteRun
from lib.runs.storage import Storage
from tests.support.remote import URL, a_run, clean_bucket, config, remote_of, there
from train.record import RunRecord
from train.upload import Copier, check_storage

PATIENCE_SECONDS = 60
put = MemoryFileSystem.pipe_file


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with clean_bucket(monkeypatch):
        yield


class Bucket:
    """What storage does with what is written to it, one file after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.opened, self.requested = False, threading.Event(), threading.Event()
        self.opened.set()
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *arguments: self._put(*arguments))

    def _put(self, files: MemoryFileSystem, path: str, data: bytes) -> None:
        self.requested.set()
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
    assert held.requested.wait(PATIENCE_SECONDS)
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
    record.copy_final_status()
    assert "The newest checkpoint is not" not in record.run.log.read_text(), "told twice"


def test_a_run_that_is_stopped_waits_for_its_copy_and_says_where_it_is_not(
    record: RunRecord, held: Bucket
) -> None:
    held.opened.clear()
    keep(record, 1)
    record.run.set_status("preempted", step=1)
    threading.Timer(0.05, held.opened.set).start()
    record.copy_final_status()
    assert there(record.run) == [1]
    assert b"preempted" in remote_of(record.run).storage.read("status.json")
    held.is_full = True
    keep(record, 2)
    record.copy_final_status()
    assert log(record)[-1].startswith(f"The newest checkpoint is not in {URL}/lenet5/")


def test_a_first_signal_does_not_cut_the_last_copy_off(record: RunRecord, held: Bucket) -> None:
    keep(record, 1)
    assert copier_of(record).wait(print) == ""
    held.opened.clear()
    held.requested.clear()

    def signal_then_open() -> None:
        assert held.requested.wait(PATIENCE_SECONDS)
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
        assert copier_of(record).wait(print) == "the copy was interrupted"
    assert copier_of(record).news() == []
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "steps", lambda _: [1, 2])  # seen before it was given up
        copier_of(record).begin()
        assert copier_of(record).wait(print) == "the copy was interrupted" and copier_of(record).news() == []
    keep(record, 2)
    assert copier_of(record).wait(print) == "" and there(record.run) == [2]


def damage(record: RunRecord, step: int) -> None:
    file = record.run.checkpoints / f"step-{step:08d}" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-20])


def test_a_damaged_checkpoint_is_told_and_is_no_end_of_the_run(record: RunRecord) -> None:
    keep(record, 1)
    assert copier_of(record).wait(print) == ""
    keep(record, 2)
    assert copier_of(record).wait(print) == "" and there(record.run) == [1, 2]
    remote_of(record.run).storage.remove("ckpt/step-00000002")
    damage(record, 2)
    what = f"checkpoint step-00000002 in {record.run.checkpoints} is damaged: manifest.json is not as it was"
    with pytest.raises(ToolkitError, match=re.escape(what)) as error:
        record.finish(2, seconds=1.0, result={"samples": 1.0, "loss": 0.5}, part="test part")
    assert "\n" not in str(error.value) and "the newest checkpoint is not in" in str(error.value)
    assert record.run.status().state == "done" and there(record.run) == [1]
    assert not remote_of(record.run).is_done(), "it would need its last checkpoint"


def test_a_damaged_best_checkpoint_does_not_keep_the_newest_from_being_copied(record: RunRecord) -> None:
    record.save(1, {"a": torch.zeros(50)}, best=True)
    assert copier_of(record).wait(print) == ""
    (record.run.checkpoints / "step-00000001" / "manifest.json").unlink()
    for step in (2, 3):
        keep(record, step)
        assert copier_of(record).wait(print) == ""
        record.progress(step, 0.1)
    assert {2, 3} <= set(there(record.run))
    told = [
        line for line in log(record) if line.startswith("The best checkpoint is not copied: checkpoint step-")
    ]
    assert len(told) == 1 and told[0].endswith("is damaged: manifest.json: No such file or directory")


def test_a_mistake_of_ours_is_no_copy(record: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "copy", None)
        keep(record, 1)
        assert copier_of(record).wait(print) == "the copy was interrupted"
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
