"""Sharded parameters by torch's fully_shard, and state dicts that do not depend on the sharding.

A gathered state has full tensors in the form of a single process, so that a checkpoint can be loaded by any
number of ranks with any parallelism strategy. The torch modules for it take a second to import, so they are
imported on use.
"""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lib.plan.types import Layout, Weight

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor

    from lib.runs.dcp import Shard, StoredTensor


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are FSDP units: composed members of ModuleLists and Sequentials."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children():
            composed = any(True for _ in child.children()) and any(True for _ in child.parameters())
            composed = composed and not isinstance(child, nn.Linear)  # it may have dropout of an adapter
            if listed and composed and not isinstance(child, nn.ModuleList | nn.Sequential):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def weight_units(model: nn.Module) -> tuple[tuple[Weight, ...], ...]:
    """Return the weights of `model` by FSDP unit; the first unit has those that are in no block."""
    blocks = [list(block.parameters()) for block in blocks_of(model)]
    inside = {id(parameter) for block in blocks for parameter in block}
    root = [parameter for parameter in model.parameters() if id(parameter) not in inside]

    def weight(parameter: nn.Parameter) -> Weight:
        return Weight(tuple(parameter.shape), parameter.requires_grad, parameter.element_size())

    return tuple(tuple(map(weight, unit)) for unit in [root, *blocks])


def shard_model(model: nn.Module, layout: Layout, *, device_type: str) -> None:
    """Shard the weights of `model` in place and move them to this rank's device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    copies = layout.world // layout.shard
    sizes, names = (
        ((copies, layout.shard), ("replica", "shard")) if copies > 1 else ((layout.shard,), ("shard",))
    )
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=layout.strategy != "zero2")
    # The warning is about in-place changes to a model's output, which training does not make.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # The root's weights are needed at both ends of the forward pass.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


@contextlib.contextmanager
def single_replica(model: nn.Module) -> Iterator[None]:
    """Context in which backward passes reduce gradients within a replica, not between replicas."""
    sharded = cast("FSDPModule", model)
    sharded.set_requires_all_reduce(False)
    try:
        yield
    finally:
        sharded.set_requires_all_reduce(True)


def reshard(model: nn.Module) -> None:
    """Reshard weights that a forward pass without a backward pass has gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """True if `value` is a sharded tensor (DTensor)."""
    loaded = sys.modules.get("torch.distributed.tensor")  # a DTensor can only exist if this is loaded
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, sharing its memory; the tensor itself if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def shard_of(whole: Tensor | StoredTensor, like: object) -> Tensor:
    """Return this rank's shard of `whole`, which every rank has, sharded as `like` is.

    Of a tensor in a sharded checkpoint only this rank's rows are read. Raises CheckpointError.
    """
    if not is_sharded(like):
        return whole.read() if _is_stored(whole) else cast(Tensor, whole)
    if _is_stored(whole):
        dim = next(number for number, placement in enumerate(like.placements) if placement.is_shard(0))
        coordinates, count = like.device_mesh.get_coordinate(), like.to_local().shape[0]
        assert coordinates is not None, "this rank has a shard"
        first = coordinates[dim] * math.ceil(like.shape[0] / like.device_mesh.size(dim))
        return from_local(whole.read(first, count).to(device=like.device, dtype=like.dtype), like)
    from torch.distributed.tensor import distribute_tensor

    moved = cast(Tensor, whole).to(device=like.device, dtype=like.dtype)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def _is_stored(value: object) -> TypeGuard[StoredTensor]:
    loaded = sys.modules.get(__name__.removesuffix("distributed.fsdp") + "runs.dcp")
    return loaded is not None and isinstance(value, loaded.StoredTensor)


def from_local(part: Tensor, like: Tensor) -> Tensor:
    """Wrap this rank's shard `part` as a tensor sharded like `like`."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements, size, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=size, stride=stride)


@dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of a tensor of `shape`, sharded over ranks in order along dimension 0."""

    own: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """This rank's entries of a mapping; other ranks have the others."""

    own: Mapping[Any, Any]


class Gatherer:
    """Gathers sharded state from the first `ranks` processes to rank 0, over a group used for nothing else.

    A group of its own allows use on another thread than the training one: collectives of two threads in one
    group would mix. None: one process, which has everything.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, rank: int, ranks: int = 1) -> None:
        self.rank, self.ranks, self.group = rank, ranks, group

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather tensors of one shape and dtype to rank 0, on the CPU; empty on other ranks."""
        if self.group is None:
            return [tensor.cpu()]
        # Sent as bytes: gloo cannot send every dtype.
        sent = tensor.cpu().contiguous().flatten().view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.ranks)] if self.rank == 0 else []
        dist.gather(sent, received or None, dst=0, group=self.group)
        return [part.view(tensor.dtype).view(tensor.shape) for part in received]

    def gather_entries(self, entries: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
        """Gather mappings to rank 0, with tensors on the CPU; empty on other ranks."""
        if self.group is None:
            return [entries]

        def on_cpu(leaf: Any) -> Any:
            return leaf.cpu() if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

        sent = _map_leaves(entries, on_cpu)
        received: list[Any] = [None] * self.ranks if self.rank == 0 else []
        dist.gather_object(sent, received or None, dst=0, group=self.group)
        return received


def to_local(state: Any) -> Any:
    """Replace sharded tensors in `state` by this rank's local part, sharing its memory."""

    def part(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        sharded = any(placement.is_shard(0) for placement in leaf.placements)
        return Rows(leaf.to_local(), tuple(leaf.shape)) if sharded else leaf.to_local()

    return _map_leaves(state, part)


def snapshot(parts: Any, *, replicated: bool) -> Any:
    """Copy a `to_local` state to main memory, so that training can continue meanwhile.

    replicated: also copy the tensors that every rank has, which one rank has to do.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        """Copy each storage once, so that tied weights stay tied."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or tensor.numel() == 0:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return Rows(copy(leaf.own), leaf.shape)
        if isinstance(leaf, Entries):
            own = _map_leaves(leaf.own, lambda item: copy(item) if isinstance(item, Tensor) else item)
            return Entries(own)
        if isinstance(leaf, Tensor):
            return copy(leaf) if replicated else None
        return leaf

    return _map_leaves(parts, copy_leaf)


def gather_full(parts: Any, gatherer: Gatherer) -> Any:
    """Gather a state to rank 0; other ranks get None in place of sharded tensors.

    A collective of all ranks of `gatherer`, which must pass the same structure.
    """

    def gather_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Rows | Entries):
            return leaf
        if gatherer.rank >= gatherer.ranks:
            return None
        if isinstance(leaf, Rows):
            return _gather_rows(leaf, gatherer)
        entries = [item for own in gatherer.gather_entries(leaf.own) for item in own.items()]
        return dict(sorted(entries))

    return _map_leaves(parts, gather_leaf)


def split_shards(parts: Any, gatherer: Gatherer, *, name: str, shards: dict[str, Shard]) -> Any:
    """Move the tensors of a `to_local` state, called `name`, that have dimensions into `shards`.

    Returns on rank 0 the state with meta tensors in their places. Collective as `gather_full`.
    """
    from lib.runs.dcp import Shard, map_named

    def take(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Entries):
            return Entries({key: map_named(value, take, f"{path}/{key}") for key, value in leaf.own.items()})
        if isinstance(leaf, Rows):
            first = gatherer.rank * math.ceil(leaf.shape[0] / gatherer.ranks)
            shard = Shard(leaf.own, first, leaf.shape)
        elif isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.numel() > 0:
            shard = Shard(leaf, 0, tuple(leaf.shape))
        else:
            return leaf
        shards[path] = shard
        return torch.empty(shard.shape, dtype=shard.rows.dtype, device="meta")

    return gather_full(map_named(parts, take, name), gatherer)


def _gather_rows(part: Rows, gatherer: Gatherer) -> Tensor | None:
    rows, *others = part.shape
    per_rank = math.ceil(rows / gatherer.ranks)
    padded = part.own.new_zeros((per_rank, *others))
    padded[: len(part.own)] = part.own
    shards = [shard[: max(0, rows - rank * per_rank)] for rank, shard in enumerate(gatherer.gather(padded))]
    return torch.cat(shards) if shards else None


def gathered(value: Any) -> Any:
    """Replace sharded tensors in `value` by full ones. A collective of all ranks, with the same structure."""
    return _map_leaves(value, lambda leaf: leaf.full_tensor() if is_sharded(leaf) else leaf)


def _map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every leaf of nested mappings and lists."""
    if isinstance(value, Mapping):
        return {key: _map_leaves(item, change) for key, item in value.items()}
    return [_map_leaves(item, change) for item in value] if isinstance(value, list) else change(value)


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Clip gradients to the total norm `max_norm`, computed over all ranks."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = gathered(nn.utils.get_total_norm(gradients))
    torch._foreach_mul_([*map(local, gradients)], (max_norm / (norm + 1e-6)).clamp(max=1.0))


def shard_optimizer_state(
    groups: Sequence[dict[str, Any]], rule: type[torch.optim.Optimizer], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Make an optimizer whose state is distributed over ranks by whole weights (ZeRO-1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class=rule, **options)


def local_shard(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that holds this rank's state."""
    return optimizer.optim if _is_sharded_state(optimizer) else optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of a single process, sharded where ranks have shards (`gather_full`)."""
    if not _is_sharded_state(optimizer):
        state: dict[str, Any] = to_local(optimizer.state_dict())
        return state
    own, numbers = local_shard(optimizer), _numbers(optimizer)
    entries = {numbers[id(weight)]: own.state[weight] for weight in _weights(own) if weight in own.state}
    # Not its own `state_dict`, which requires the entries to be sent to one rank first.
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    return {"state": Entries(entries), "param_groups": groups}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's shard of a full state. Raises ValueError or KeyError where it does not fit."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in state["param_groups"]] != counts:
        raise ValueError("the state of the optimizer is for other weights")
    own = local_shard(optimizer)
    numbers = _numbers(optimizer)
    kept: dict[int, Any] = {}
    for place, weight in enumerate(_weights(own)):
        entry = state["state"].get(numbers[id(weight)])
        if entry is not None and not weight.is_meta:
            kept[place] = {name: _shard_state(value, weight) for name, value in entry.items()}
    groups, first = [], 0
    for group, saved in zip(own.param_groups, state["param_groups"], strict=True):
        count = len(group["params"])
        groups.append({**saved, "params": list(range(first, first + count))})
        first += count
    own.load_state_dict({"state": kept, "param_groups": groups})
    if own is not optimizer:
        for group, loaded in zip(optimizer.param_groups, own.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})


def _is_sharded_state(optimizer: torch.optim.Optimizer) -> TypeGuard[ZeroRedundancyOptimizer]:
    loaded = sys.modules.get("torch.distributed.optim")
    return loaded is not None and isinstance(optimizer, loaded.ZeroRedundancyOptimizer)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Return the number of each weight in a state dict, by the weight's id."""
    return {id(weight): number for number, weight in enumerate(_weights(optimizer))}


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _shard_state(value: Any, weight: Tensor) -> Any:
    if not (isinstance(value, Tensor) or _is_stored(value)):
        return value
    return shard_of(value, weight if value.shape == weight.shape else None)
