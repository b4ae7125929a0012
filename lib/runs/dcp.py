"""Tensors of a sharded checkpoint, by torch.distributed.checkpoint (DCP).

    __R_0.distcp   rows and tensors that rank R has written
    .metadata      a pickle: the rows of each tensor, and their file

To import this module takes a second, so it is imported on use.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from lib import atomic
from lib.errors import CheckpointError

METADATA = ".metadata"
_DESCRIPTIONS = {  # beside dtypes and DCP's own types
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}

# One process that writes alone is no mistake here.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit", UserWarning)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of a tensor of `shape`, from row `first`, that this rank has."""

    rows: Tensor
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a sharded checkpoint, of which a rank reads what it needs."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    _reader: FileSystemReader
    _metadata: stored.Metadata

    def read(self, first: int = 0, count: int | None = None) -> Tensor:
        """Return `count` rows from row `first`, on the CPU; by default all. Raises CheckpointError."""
        rows = self.shape[0] - first if count is None else count
        target = torch.empty((rows, *self.shape[1:]), dtype=self.dtype)
        tensor = self._metadata.state_dict_metadata[self.name]
        assert isinstance(tensor, stored.TensorStorageMetadata), self.name
        chunk = _chunk(first, target.shape)
        items = create_read_items_for_chunk_list(self.name, tensor, [chunk] if rows else [])
        try:
            self._reader.read_data(plans.LoadPlan(items), _Target(target)).wait()
        except OSError as error:
            why = f"{error.filename or self.name}: {error.strerror or error}"
            raise CheckpointError(f"cannot read {self.name} of a checkpoint", why=why) from error
        return target


def map_named(value: Any, change: Callable[[str, Any], Any], name: str) -> Any:
    """Apply `change` to the name and value of every leaf of nested mappings and lists."""
    if isinstance(value, Mapping):
        return {key: map_named(item, change, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [map_named(item, change, f"{name}/{number}") for number, item in enumerate(value)]
    return change(name, value)


def write(
    shards: Mapping[str, Shard], folder: Path, *, group: dist.ProcessGroup | None, rank: int
) -> dict[str, dict[str, Any]]:
    """Write this rank's shards to `folder`, durably. A collective of `group` (None: one process).

    A tensor or row that several ranks have is written by one of them. The first rank must have made `folder`;
    it gets size and SHA-256 of each file, the others their own. Raises CheckpointError on every rank.
    """
    writer = _Writer(folder)
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        save(dict(shards), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        if not isinstance(reason, OSError):  # a mistake of ours
            raise reason from error
        what, why = f"cannot save a checkpoint in {folder.parent}", reason.strerror or str(reason)
        raise CheckpointError(what, why=why, todo="earlier checkpoints are untouched") from error
    own = {path.name: _checksum(path) for path in folder.glob(f"__{rank}_*")}
    if rank == 0:
        own[METADATA] = _checksum(folder / METADATA)
    everyone: list[Any] = [own]
    if group is not None:
        everyone *= dist.get_world_size(group)
        dist.gather_object(own, everyone if rank == 0 else None, dst=0, group=group)
    return {name: file for files in everyone for name, file in files.items()}


def stored_tensors(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `state` with a StoredTensor of `folder` in place of each meta tensor.

    Raises OSError, and UnpicklingError where the metadata have more than descriptions of tensors.
    """
    with (folder / METADATA).open("rb") as file:
        metadata = _Unpickler(file).load()
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)

    def opened(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return StoredTensor(name, leaf.shape, leaf.dtype, reader, metadata)

    return {key: map_named(value, opened, key) for key, value in state.items()}


class _File(io.FileIO):
    """File that keeps its first error: one that crosses torch's C++ writer comes out as a RuntimeError."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, unless an earlier write failed, and return its size in bytes."""
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view) and self.error is None:
                done += super().write(view[done:]) or 0
        except OSError as error:
            self.error = error
        return len(view)


class _FileSystem(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file. Raises OSError at the end where a write failed."""
        with atomic.naming(Path(path)), _File(path, mode) as file:
            try:
                yield file
            finally:
                if file.error is not None:
                    raise file.error


class _Writer(FileSystemWriter):
    """Writer into a folder that is there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _FileSystem()

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """Leave the folder alone: the first rank removes and makes it at any time before this."""
        return plan

    def storage_meta(self) -> None:
        """Store no path: the folder is renamed."""


class _Planner(DefaultSavePlanner):
    """Planner of a state of `Shard`s."""

    def create_local_plan(self) -> plans.SavePlan:
        """Return an item for each shard that has rows."""
        items = [_write_item(name, shard) for name, shard in self.state_dict.items() if shard.rows.numel()]
        self.plan = plans.SavePlan(items)
        return self.plan

    def lookup_object(self, index: stored.MetadataIndex) -> Tensor:
        """Return the tensor to write."""
        return cast(Shard, self.state_dict[index.fqn]).rows.detach()


class _Target(DefaultLoadPlanner):
    """Planner that reads into one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.lookup_tensor = lambda _: tensor  # type: ignore[assignment, method-assign]


class _Unpickler(pickle.Unpickler):
    """Loads descriptions of tensors and nothing that could run code, as torch.load's weights_only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a type of DCP's metadata or a dtype. Raises UnpicklingError for others."""
        own = module == stored.__name__ and isinstance(getattr(stored, name, None), type)
        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or of_torch or (module, name) in _DESCRIPTIONS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no description of a tensor")


def _write_item(name: str, shard: Shard) -> plans.WriteItem:
    chunk = _chunk(shard.first, shard.rows.shape)
    properties = stored.TensorProperties.create_from_tensor(shard.rows)
    data = plans.TensorWriteData(chunk, properties, torch.Size(shard.shape))
    index = stored.MetadataIndex(name, chunk.offsets)
    return plans.WriteItem(index=index, type=plans.WriteItemType.SHARD, tensor_data=data)


def _chunk(first: int, shape: torch.Size) -> stored.ChunkStorageMetadata:
    return stored.ChunkStorageMetadata(offsets=torch.Size((first, *[0] * (len(shape) - 1))), sizes=shape)


def _checksum(path: Path) -> dict[str, Any]:
    with atomic.naming(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size_bytes": file.tell(), "sha256": digest}
