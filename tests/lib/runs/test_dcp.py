"""Files of a sharded checkpoint in one process: what is written, and which rows are read."""

from __future__ import annotations

import errno
import json
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch

from lib.devices.base import Backend
from lib.errors import CheckpointError
from lib.runs import checkpoint, dcp
from tests.lib.runs.test_checkpoint_kill import refuse

WEIGHT = torch.arange(24.0).view(6, 4).to(torch.bfloat16)
STATE = {"model": {"weight": torch.empty(6, 4, dtype=torch.bfloat16, device="meta")}, "progress": {"step": 1}}
SHARDS = {"model/weight": dcp.Shard(WEIGHT, 0, (6, 4))}


def save(folder: Path) -> None:
    def write(place: Path) -> checkpoint.Files:
        return dcp.write(SHARDS, place, group=None, rank=0)

    checkpoint.save(folder, step=1, state=STATE, keep_last=1, best=True, write_shards=write)


def test_rows_are_read_when_they_are_used(tmp_path: Path) -> None:
    save(tmp_path)
    found = checkpoint.load(tmp_path, which="best", log=print)
    assert found is not None and found[1]["progress"] == {"step": 1}
    stored = found[1]["model"]["weight"]
    assert torch.equal(stored.read(), WEIGHT) and torch.equal(stored.read(2, 3), WEIGHT[2:5])
    assert stored.read(6, 0).shape == (0, 4) and stored.dtype == torch.bfloat16
    (tmp_path / "step-00000001" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="cannot read model/weight"):
        stored.read()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(CheckpointError, match=r"cannot save a checkpoint in .*: No space left on device"):
        save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_while_torch_writes_is_an_error(tmp_path: Path) -> None:
    large = {name: dcp.Shard(torch.zeros(100_000), 0, (100_000,)) for name in ("model/weight", "model/bias")}

    def write(place: Path) -> checkpoint.Files:
        return dcp.write(large, place, group=None, rank=0)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot save a checkpoint in .*: File too large"):
            checkpoint.save(tmp_path, step=1, state=STATE, keep_last=1, best=True, write_shards=write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def without(folder: Path, name: str) -> None:
    """Remove a file of the checkpoint in `folder`, of its manifest too."""
    (folder / name).unlink()
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"], content["files"][name]
    (folder / "manifest.json").write_bytes(checkpoint.encode_manifest(content))


@pytest.mark.parametrize("alone", [True, False])
def test_metadata_that_cannot_be_read_are_damage(tmp_path: Path, alone: bool) -> None:
    save(tmp_path)
    without(tmp_path / "step-00000001", ".metadata")
    said = list[str]()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path, log=said.append, ranks=None if alone else Backend("cpu"))
    assert said == ["warning: checkpoint step-00000001 is damaged: .metadata: No such file or directory"]


def test_a_rank_whose_reading_fails_takes_the_others_along(tmp_path: Path) -> None:
    save(tmp_path)
    first = {1: tmp_path / "step-00000001"}  # as rank 0 lists it; nothing of this rank is sent
    other = mock.Mock(rank=1, world=2, broadcast={None: first}.get, all_reduce_max=lambda _: (True,))
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path, log=print, ranks=other)


def test_the_first_rank_reports_what_another_has_found(tmp_path: Path) -> None:
    save(tmp_path)
    folder = tmp_path / "step-00000001"
    names = sorted(json.loads((folder / "manifest.json").read_bytes())["files"])
    (folder / names[1]).write_bytes(b"")  # which the second of two verifies
    first = mock.Mock(rank=0, world=2, broadcast=lambda value: value, all_reduce_max=lambda _: (True,))
    said = list[str]()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        checkpoint.load(tmp_path, log=said.append, ranks=first)
    assert said[0].startswith(f"warning: checkpoint {folder.name} is damaged: {names[1]} has 0 bytes, not ")


def test_a_rank_that_cannot_list_checkpoints_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error before the broadcast would leave the others waiting in it."""
    stale = mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    monkeypatch.setattr(checkpoint, "_checkpoints", stale)
    other = mock.Mock(rank=1, world=2, broadcast={None: {}}.get)
    assert checkpoint.load(tmp_path, log=print, ranks=other) is None
    with pytest.raises(CheckpointError, match="Stale file handle"):
        checkpoint.load(tmp_path, log=print, ranks=mock.Mock(rank=0, world=2))


def test_received_files_are_those_of_the_manifest(tmp_path: Path) -> None:
    save(tmp_path / "one")
    source = tmp_path / "one" / "step-00000001"
    checkpoint.receive(
        tmp_path / "two", step=1, fetch=lambda name, path: path.write_bytes((source / name).read_bytes())
    )
    assert {path.name for path in (tmp_path / "two" / "step-00000001").iterdir()} == {
        *("state.pt", ".metadata", "__0_0.distcp", "manifest.json")
    }
