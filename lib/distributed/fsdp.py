"""Weights in parts on several ranks, by torch's fully_shard, and states that are the same however spread.

A state that is gathered has whole tensors in the form of one process, so that a checkpoint of any number of
ranks is that of any other, and of any other way to spread. What torch needs for it takes a second to load and
is loaded by those who cut only.
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


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What is gathered at once: members of lists and sequences that are made of modules themselves."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children():
            composed = any(True for _ in child.children()) and any(True for _ in child.parameters())
            if listed and composed and not isinstance(child, nn.ModuleList | nn.Sequential):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def weight_units(model: nn.Module) -> tuple[tuple[Weight, ...], ...]:
    """The weights of `model` by what is gathered at once; first those that are in no block."""
    blocks = [list(block.parameters()) for block in blocks_of(model)]
    inside = {id(parameter) for block in blocks for parameter in block}
    root = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return tuple(tuple(Weight(tuple(p.shape), p.requires_grad) for p in unit) for unit in [root, *blocks])


def shard_model(model: nn.Module, layout: Layout, *, device_type: str) -> None:
    """Cut the weights of `model` into parts, in place, and move them to this rank's device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    copies = layout.world // layout.shard
    sizes, names = ((copies, layout.shard), ("copy", "part")) if copies > 1 else ((layout.shard,), ("part",))
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=layout.strategy != "zero2")
    # Nothing is done in place to what a model returns.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    # What is in no block is needed at both ends of the forward pass.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


@contextlib.contextmanager
def one_copy_only(model: nn.Module) -> Iterator[None]:
    """Within it, backward passes sum gradients within a copy and not between copies."""
    sharded = cast("FSDPModule", model)
    sharded.set_requires_all_reduce(False)
    try:
        yield
    finally:
        sharded.set_requires_all_reduce(True)


def cut_again(model: nn.Module) -> None:
    """Let go of weights that a forward pass without a backward pass has put together."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_cut(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a tensor of which every rank has a part."""
    loaded = sys.modules.get("torch.distributed.tensor")  # where it is not, there is none
    return loaded is not None and isinstance(value, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds, sharing its memory; all of a tensor that is not cut."""
    return tensor.to_local() if is_cut(tensor) else tensor


def part_like(whole: Tensor, like: Tensor) -> Tensor:
    """Of `whole`, which every rank has, this rank's part, cut as `like` is."""
    if not is_cut(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    there = whole.to(device=like.device, dtype=like.dtype)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


def as_part(part: Tensor, like: Tensor) -> Tensor:
    """This rank's `part` of a tensor that is cut as `like` is, known to be one."""
    if not is_cut(like):
        return part
    from torch.distributed.tensor import DTensor

    size, stride = like.shape, like.stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=size, stride=stride
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """What this rank has of a tensor of `shape`: its rows, of which ranks in order have as many each."""

    own: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """What this rank has of a mapping; other ranks have the other entries."""

    own: Mapping[Any, Any]


class Gatherer:
    """Brings to rank 0 what each of `ranks` processes has a part of. Here there is one, with everything."""

    ranks = 1

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    @property
    def takes_part(self) -> bool:
        """Whether this rank has a part, or is the one that all come to."""
        return self.rank < self.ranks

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0 the tensors of all ranks, which are of one shape, on the CPU; on the others nothing."""
        return [tensor.cpu()]

    def gather_entries(self, entries: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
        """On rank 0 the mappings of all ranks, their tensors on the CPU; on the others nothing."""
        return [entries]


class GroupGatherer(Gatherer):
    """The first `ranks` processes, over a process group that they use for nothing else.

    So it may be used on another thread than the one that trains: what two threads send in one group mixes.
    """

    def __init__(self, group: dist.ProcessGroup, *, rank: int, ranks: int) -> None:
        super().__init__(rank=rank)
        self.ranks = ranks
        self._group = group

    def gather(self, tensor: Tensor) -> list[Tensor]:
        # As bytes: not every type can be sent.
        sent = tensor.cpu().contiguous().flatten().view(torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.ranks)] if self.rank == 0 else []
        dist.gather(sent, received or None, dst=0, group=self._group)
        return [part.view(tensor.dtype).view(tensor.shape) for part in received]

    def gather_entries(self, entries: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
        sent = _each(entries, lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf)
        received: list[Any] = [None] * self.ranks if self.rank == 0 else []
        dist.gather_object(sent, received or None, dst=0, group=self._group)
        return received


def in_parts(state: Any) -> Any:
    """`state` with what this rank has, sharing its memory, in place of tensors that are cut."""

    def part(leaf: Any) -> Any:
        if not is_cut(leaf):
            return leaf
        cut = any(placement.is_shard(0) for placement in leaf.placements)
        return Rows(leaf.to_local(), tuple(leaf.shape)) if cut else leaf.to_local()

    return _each(state, part)


def snapshot(parts: Any, *, whole: bool) -> Any:
    """A copy of a state `in_parts` in main memory, which training that goes on leaves as it is.

    whole: with the tensors that every rank has; of several ranks one is enough.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        """One for each memory: weights that are tied stay so."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies or tensor.numel() == 0:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    def taken(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return Rows(copy(leaf.own), leaf.shape)
        if isinstance(leaf, Entries):
            return Entries(_each(leaf.own, lambda item: copy(item) if isinstance(item, Tensor) else item))
        if isinstance(leaf, Tensor):
            return copy(leaf) if whole else None
        return leaf

    return _each(parts, taken)


def put_together(parts: Any, gatherer: Gatherer) -> Any:
    """A state with whole tensors on rank 0, and None in place of those that were in parts on the others.

    All ranks that take part in `gatherer` must call it, with the same structure.
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, Rows | Entries):
            return leaf
        if not gatherer.takes_part:
            return None
        if isinstance(leaf, Rows):
            return _of_all_rows(leaf, gatherer)
        entries = [item for own in gatherer.gather_entries(leaf.own) for item in own.items()]
        return dict(sorted(entries))

    return _each(parts, whole)


def _of_all_rows(part: Rows, gatherer: Gatherer) -> Tensor | None:
    rows, *others = part.shape
    each = math.ceil(rows / gatherer.ranks)
    sent = part.own.new_zeros((each, *others))
    sent[: len(part.own)] = part.own
    gathered = gatherer.gather(sent)
    own = [rows_of_one[: max(0, rows - rank * each)] for rank, rows_of_one in enumerate(gathered)]
    return torch.cat(own) if own else None


def gathered(value: Any) -> Any:
    """`value` with whole tensors in place of parts. All ranks must call it, with the same structure."""
    return _each(value, lambda leaf: leaf.full_tensor() if is_cut(leaf) else leaf)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with everything changed that is in its mappings and lists."""
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}
    return [_each(item, change) for item in value] if isinstance(value, list) else change(value)


def clip_gradients(model: nn.Module, largest_norm: float) -> None:
    """Scale gradients down to `largest_norm`, the norm being that over all ranks."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = gathered(nn.utils.get_total_norm(gradients))
    torch._foreach_mul_(
        [local(gradient) for gradient in gradients], (largest_norm / (norm + 1e-6)).clamp(max=1.0)
    )


def shared_out(
    groups: Sequence[dict[str, Any]], rule: type[torch.optim.Optimizer], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of which every rank has the part for some whole weights (ZeRO-1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(groups, optimizer_class=rule, **options)


def own_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What holds the state on this rank."""
    return optimizer.optim if _is_shared_out(optimizer) else optimizer


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as a process alone would have it, in parts where ranks have parts (`put_together`)."""
    if not _is_shared_out(optimizer):
        state: dict[str, Any] = in_parts(optimizer.state_dict())
        return state
    own, numbers = own_part(optimizer), _numbers(optimizer)
    entries = {numbers[id(weight)]: own.state[weight] for weight in _weights(own) if weight in own.state}
    # Not its own `state_dict`, for which it would have to send the entries to one rank by then.
    groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
    return {"state": Entries(entries), "param_groups": groups}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take this rank's part of a whole state. Raises ValueError or KeyError where it does not fit."""
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in state["param_groups"]] != counts:
        raise ValueError("the state of the optimizer is for other weights")
    own = own_part(optimizer)
    numbers = _numbers(optimizer)
    kept: dict[int, Any] = {}
    for place, weight in enumerate(_weights(own)):
        of_one = state["state"].get(numbers[id(weight)])
        if of_one is not None:
            kept[place] = {name: _part_of_state(value, weight) for name, value in of_one.items()}
    groups, first = [], 0
    for group, saved in zip(own.param_groups, state["param_groups"], strict=True):
        count = len(group["params"])
        groups.append({**saved, "params": list(range(first, first + count))})
        first += count
    own.load_state_dict({"state": kept, "param_groups": groups})
    if own is not optimizer:
        for group, loaded in zip(optimizer.param_groups, own.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})


def _is_shared_out(optimizer: torch.optim.Optimizer) -> TypeGuard[ZeroRedundancyOptimizer]:
    loaded = sys.modules.get("torch.distributed.optim")
    return loaded is not None and isinstance(optimizer, loaded.ZeroRedundancyOptimizer)


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """What a state calls each weight, by the weight's id."""
    return {id(weight): number for number, weight in enumerate(_weights(optimizer))}


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (weight for group in optimizer.param_groups for weight in group["params"])


def _part_of_state(value: Any, weight: Tensor) -> Any:
    shaped = isinstance(value, Tensor) and value.shape == weight.shape
    return part_like(value, weight) if shaped else value
