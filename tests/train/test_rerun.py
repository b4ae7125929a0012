"""What make rerun tells: every fact that is not as it was, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ToolkitError
from lib.runs.directory import RunDir
from train.stored_run import differences

STORED: dict[str, dict[str, Any]] = {
    "env": {"torch": "2.12.0", "git_commit": None, "git_dirty": False},
    "hardware": {"kind": "cuda", "devices": [{"name": "T4", "free_bytes": 15}]},
    "plan": {"micro_batch": 8, "reasons": {"micro_batch": "it fits"}},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    for name, content in STORED.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return RunDir(tmp_path)


def test_nothing_is_told_where_all_is_the_same(run: RunDir) -> None:
    now = json.loads(json.dumps(STORED))
    # Free memory differs from one moment to the next, and so do sentences about it.
    now["hardware"]["devices"][0]["free_bytes"] = 12
    now["plan"]["reasons"]["micro_batch"] = "it fits well"
    assert list(differences(run, now=now)) == []


def test_versions_machine_and_plan_are_told(run: RunDir) -> None:
    devices = [{"name": "A10G", "free_bytes": 22}, {"name": "A10G", "free_bytes": 22}]
    now = {
        "env": {"torch": "2.13.0", "git_commit": "abc", "git_dirty": True},
        "hardware": {"kind": "cuda", "devices": devices},
        "plan": {"micro_batch": 16, "reasons": {}},
    }
    assert list(differences(run, now=now)) == [
        "env: torch 2.12.0 -> 2.13.0",
        "env: git_commit none -> abc",
        "env: git_dirty no -> yes",
        "hardware: devices 0 name T4 -> A10G",
        "hardware: devices 1 name none -> A10G",
        "plan: micro_batch 8 -> 16",
    ]


def test_a_tuple_is_the_list_that_it_was_stored_as(run: RunDir) -> None:
    now = STORED | {"hardware": {"kind": "cuda", "devices": ({"name": "T4", "free_bytes": 15},)}}
    assert list(differences(run, now=now)) == []


def test_a_run_without_its_files_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError):
        list(differences(RunDir(tmp_path), now=STORED))
