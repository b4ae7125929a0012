"""What is on the disk before what: a power cut forgets whatever was not synced, a directory's names too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lib import atomic
from lib.runs import checkpoint
from lib.runs.directory import RunDir


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`sync NAME` and `name NAME` (what a rename makes visible) in the order in which they happened."""
    found: list[str] = []
    fsync = os.fsync

    def traced_fsync(descriptor: int) -> None:
        found.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")  # noqa: PTH115
        fsync(descriptor)

    def traced(rename: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def renamed(source: str, target: str) -> None:
            found.append(f"name {Path(target).name}")
            rename(source, target)

        return renamed

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", traced(os.rename))
    monkeypatch.setattr(os, "replace", traced(os.replace))
    return found


def test_a_checkpoint_is_on_the_disk_before_it_has_a_name_and_has_one_before_it_is_the_latest(
    tmp_path: Path, events: list[str]
) -> None:
    checkpoint.save(tmp_path / "ckpt", step=2, state={"w": torch.ones(3)}, keep_last=1, best=True)
    written = ["sync state.pt", "sync manifest.json", "sync .saving-step-00000002"]
    assert events[:5] == [*written, "name step-00000002", "sync ckpt"]
    assert events.index("name latest") < events.index("name best")
    assert events[events.index("name best") + 1] == "sync ckpt"


def test_a_run_has_its_files_on_the_disk_before_it_has_a_name(tmp_path: Path, events: list[str]) -> None:
    run = RunDir.create(tmp_path, model="m", identity="0123abcd", files={"config": "", "plan": {}})
    run.release()
    hidden = events[3].removeprefix("sync ")
    assert hidden.startswith(".new-")
    written = ["sync config", "sync plan.json", "sync status.json", f"sync {hidden}"]
    assert events == [*written, f"name {run.name}", "sync m"]


def test_a_download_is_on_the_disk_before_it_has_its_name(tmp_path: Path, events: list[str]) -> None:
    (tmp_path / "set.part").write_bytes(b"bytes")
    atomic.publish(tmp_path / "set.part", tmp_path / "set")
    assert events == ["sync set.part", "name set", f"sync {tmp_path.name}"]
    assert (tmp_path / "set").read_bytes() == b"bytes"
