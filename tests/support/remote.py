"""A run on storage that is a dict, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lib.config import Config
from lib.kconf import Resolved
from lib.runs import checkpoint
from lib.runs.directory import RunDir
from lib.runs.identity import identity
from lib.runs.remote import RemoteRun, contents
from lib.runs.storage import Storage, open_storage
from tests.support.configs import make_config

ASKED = Resolved(values={"SEED": 1}, in_effect={"SEED": 1}, origins={}, given={}, text="", minimal="")
HASH = identity(ASKED.in_effect)
URL = "memory://bucket"


@contextmanager
def clean_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, the disk is quick; what was written to memory:// is gone after it."""
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
    whole = storage or open_storage(URL, requested="X")
    return RemoteRun(run.name, whole.below(f"lenet5/{run.name}"))


def copy(run: RunDir, *, keep_last: int = 3) -> None:
    remote_of(run).copy(run.checkpoints, contents(run), keep_last=keep_last)


def there(run: RunDir) -> list[int]:
    return sorted(remote_of(run).manifests())
