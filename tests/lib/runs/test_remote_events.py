"""TensorBoard's files of a run on storage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.runs.directory import RunDir
from lib.runs.sinks import EventFile
from lib.runs.storage import open_storage
from tests.support.event_files import read_events, use_stand_in
from tests.support.remote import ASKED, URL, a_run, clean_bucket, config, copy, save
from train.upload import interrupted


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_stand_in(monkeypatch)
    with clean_bucket(monkeypatch):
        yield


def told_to_tensorboard(run: RunDir, *steps: int) -> None:
    """What a start does that makes these steps; the first row of each is of all that was before."""
    run.sinks.mkdir(exist_ok=True)
    file = EventFile(run.sinks, began=run.began)
    file.send([{"kind": "train", "step": step, "loss": 1 / step} for step in steps])
    file.close(done=False)


def seen_by_tensorboard(folder: Path) -> dict[str, list[int]]:
    files = sorted(folder.glob("events*"))
    return {path.name[-2:]: [event.step for event in read_events(path) if event.values] for path in files}


def test_files_of_tensorboard_go_to_storage_and_come_back(tmp_path: Path) -> None:
    run = a_run(tmp_path / "lost")
    told_to_tensorboard(run, 1, 2)
    (run.sinks / "wandb").mkdir()
    (run.sinks / "wandb" / "of-wandb").write_text("x")
    save(run, 2)
    copy(run)
    assert open_storage(URL, requested="X").below(f"lenet5/{run.name}").entries("sinks") == [
        "events.out.tfevents.000001"
    ]
    shutil.rmtree(run.path)

    found = interrupted(config(), ASKED, runs=tmp_path / "found", log=print)
    assert found is not None
    assert seen_by_tensorboard(found.sinks) == {"01": [1, 2]}
    told_to_tensorboard(found, 1, 2, 3)
    told_to_tensorboard(found, 1, 2, 3, 4)  # after which the first one is removed
    save(found, 4)
    copy(found)
    storage = open_storage(URL, requested="X").below(f"lenet5/{run.name}/sinks")
    assert storage.sizes() == {path.name: path.stat().st_size for path in found.sinks.iterdir()}
    assert seen_by_tensorboard(found.sinks) == {"02": [], "03": [1, 2, 3, 4]}
