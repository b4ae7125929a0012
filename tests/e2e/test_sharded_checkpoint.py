"""Sharded checkpoints of real process groups: the same state as full ones, on any number of processes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.devices.base import Backend
from lib.errors import CheckpointError
from lib.plan.types import Layout
from lib.runs import checkpoint, dcp
from lib.runs.directory import checkpoint_name
from tests.e2e.sharded_checkpoint_worker import BEFORE, FIRST, FORMS, KILLED, SAVED_AS, first_steps
from tests.e2e.sharded_worker import digest, saving_job, weights_and_states
from tests.e2e.workers import run_worker
from tests.support.once import made_once
from train.loop import load_state_dict, state_dict

pytestmark = pytest.mark.slow

ALONE = Layout(strategy="single", world=1, shard=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker leaves."""
    return made_once(
        tmp_path_factory, "sharded-checkpoints", lambda path: run_worker("sharded_checkpoint_worker", path)
    )


@pytest.fixture(scope="module")
def found(directory: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(directory / "found.pt")
    return loaded


def state_of(folder: Path, which: checkpoint.Which = "latest") -> dict[str, Any]:
    """A state with all its tensors."""
    loaded = checkpoint.load(folder, which=which, log=print)
    assert loaded is not None

    def read(_: str, leaf: Any) -> Any:
        return leaf.read() if isinstance(leaf, dcp.StoredTensor) else leaf

    return {name: dcp.map_named(value, read, name) for name, value in loaded[1].items()}


def without_seconds(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "progress": {**state["progress"], "seconds": None}}


def files_of(folder: Path, step: int) -> set[str]:
    manifest = (folder / checkpoint_name(step) / "manifest.json").read_bytes()
    return set(checkpoint.decode_manifest(manifest, step=step)["files"])


@pytest.mark.parametrize("name", SAVED_AS)
def test_it_is_the_state_of_a_full_checkpoint(name: str, directory: Path) -> None:
    folders = {form: directory / f"{name}-{form}" / "ckpt" for form in FORMS[name]}
    for step in range(1, first_steps(name) + 1):
        states = {form: digest(without_seconds(state_of(folders[form], step))) for form in folders}
        assert set(states.values()) == {states["full"]} and len(states) >= 2, step
        assert files_of(folders["full"], step) == {"state.pt"}
        writers = 1 if name == "ddp" else SAVED_AS[name].shard if name != "zero1" else 4
        parts = {f"__{rank}_0.distcp" for rank in range(writers)}
        assert files_of(folders["sharded"], step) == {"state.pt", ".metadata", *parts}


def test_every_rank_writes_its_shard(directory: Path) -> None:
    """Of sharded weights equal parts, and of a replicated model each a share."""
    for name, at_least in {"fsdp": 0.24, "zero1": 0.1}.items():
        folder = directory / f"{name}-sharded" / "ckpt" / checkpoint_name(first_steps(name))
        sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
        assert len(sizes) == 4 and min(sizes) > at_least * sum(sizes), sizes
        assert (folder / "state.pt").stat().st_size < 0.05 * sum(sizes)


def test_four_then_two_then_three_then_one(directory: Path, found: dict[str, Any]) -> None:
    assert found["loaded by 2"] == digest(weights_and_states(state_of(directory / "fsdp-full" / "ckpt")))
    assert found["loaded by 3"] == found["trained by 2"] != found["loaded by 2"]
    job = saving_job(ALONE, Backend("cpu"))
    loaded = checkpoint.load(directory / "chain" / "ckpt", log=print)
    assert loaded is not None and loaded[0] == FIRST + 2
    progress = load_state_dict(job, loaded[1])
    assert digest(weights_and_states(state_dict(job, progress))) == found["trained by 3"]


def test_a_damaged_shard_is_reported_and_the_one_before_is_loaded(
    directory: Path, found: dict[str, Any], tmp_path: Path
) -> None:
    warning = f"warning: checkpoint {checkpoint_name(FIRST)} is damaged: the SHA-256 of __2_0.distcp differs"
    assert found["damaged"] == ([FIRST - 1, 1 - FIRST], [warning])
    copy = tmp_path / "ckpt"
    shutil.copytree(directory / "damaged" / "ckpt", copy)
    (copy / checkpoint_name(FIRST - 1) / "__0_0.distcp").unlink()
    said: list[str] = []
    loaded = checkpoint.load(copy, log=said.append)
    assert loaded is not None and loaded[0] == FIRST - 2 and len(said) == 2


@pytest.mark.long
def test_a_kill_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """The worker has checked every number of what it found."""
    run_worker("sharded_checkpoint_worker", tmp_path, "kill")
    kills = torch.load(tmp_path / "kills.pt")
    for rank, changes in {0: 15, 1: 1}.items():
        *killed, (last, ended) = [kills[key] for key in sorted(kills) if key[0] == rank]
        assert (last, ended) == (KILLED, [0, 0]) and len(killed) >= changes
        for step, ended in killed:
            assert ended[rank] == -signal.SIGKILL and 0 not in ended
            assert step == BEFORE or rank == 0
        steps = [step for step, _ in killed]
        assert steps == sorted(steps), "what was installed is installed"


def test_metadata_cannot_run_code(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ckpt" / checkpoint_name(FIRST)
    shutil.copytree(directory / "fsdp-sharded" / "ckpt" / checkpoint_name(FIRST), copy)
    (copy / ".metadata").write_bytes(b"cos\nsystem\n(S'touch harm'\ntR.")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["files"][".metadata"] = dcp._checksum(copy / ".metadata")
    (copy / "manifest.json").write_bytes(checkpoint.encode_manifest(manifest))
    said = list[str]()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path / "ckpt", log=said.append)
    assert said == [f"warning: checkpoint {copy.name} is damaged: it holds more than tensors and numbers"]
    manifest["files"]["../harm"] = manifest["files"][".metadata"]
    with pytest.raises(checkpoint.DamagedError, match="another directory"):
        checkpoint.decode_manifest(checkpoint.encode_manifest(manifest), step=FIRST)
