"""Real steps as one rank of up to 1024: what it holds and what it exchanges are what the plan counts with.

torch's fake process group does nothing in a collective operation but return. So no value means anything here.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from lib.devices.base import Backend, DistributedBackend
from lib.distributed.fsdp import local, local_shard, shard_model, weight_units
from lib.memory.live import LiveBytes, add_state
from lib.plan.sharding import exchanges, held, layouts, part_elements, shares
from lib.plan.types import Layout
from tests.e2e.sharded_worker import state_bytes
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import small_job, small_plan
from train.job import Job, Progress
from train.loop import optimizer_step
from train.training_data import TrainingData

# torch.distributed.optim, where ZeRO-1 is, uses what torch 2.13 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

MICRO_BATCHES = (1, 1)
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "hsdp"]
WORLDS = [8, 64, 256, 1024]
CONFIG = small_lm_config(optimizer="adamw", momentum=None)

# What is exchanged: kind, processes, elements of the whole.
Call = tuple[str, int, int]


class FakeRank(DistributedBackend):
    """The backend of several processes over a group of which only this one is there."""

    def __init__(self, *, rank: int, world: int) -> None:
        Backend.__init__(self, "cpu", rank=rank, world=world)
        self._host_group = dist.group.WORLD

    def wrap(self, model: nn.Module, *, share_buffers: bool) -> nn.Module:
        wrapped = super().wrap(model, share_buffers=share_buffers)
        assert isinstance(wrapped, DistributedDataParallel)
        wrapped.register_comm_hook(None, reduced_at_once)
        return wrapped


def reduced_at_once(_, bucket):  # type: ignore[no-untyped-def]  # torch would read the types, not their names
    """What DistributedDataParallel does by itself; it cannot wait for work of the fake group (torch 2.13)."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Exchanged(TorchDispatchMode):
    """Listens to the collective operations of torch, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.calls[described(function, args)] += 1
        return function(*args, **(kwargs or {}))


def described(function: Any, args: Any) -> Call:
    operation = str(function).split(".")[1]
    if operation == "_allgather_base_":
        whole, _, group = args[:3]
        return "all_gather", dist.ProcessGroup.unbox(group).size(), whole.numel()
    if operation == "_reduce_scatter_base_":
        _, whole, group = args[:3]
        return "reduce_scatter", dist.ProcessGroup.unbox(group).size(), whole.numel()
    tensors, group = args[:2]
    kind = {"allreduce_": "all_reduce", "broadcast_": "broadcast"}.get(operation, operation)
    return kind, dist.ProcessGroup.unbox(group).size(), sum(tensor.numel() for tensor in tensors)


@functools.cache
def data() -> TrainingData:
    return text_data(CONFIG)


def layout_of(strategy: str, world: int) -> Layout:
    return next(each for each in layouts(world) if each.strategy == strategy)


@contextmanager
def job_on(layout: Layout, *, rank: int = 0) -> Iterator[Job]:
    """A job as rank `rank` of many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        plan = small_plan(*MICRO_BATCHES, world=layout.world, strategy=layout.strategy, shard=layout.shard)
        yield small_job(CONFIG, plan, data(), backend=FakeRank(rank=rank, world=layout.world))
    finally:
        dist.destroy_process_group()


def exchanged_by(layout: Layout) -> tuple[Counter[Call], int]:
    """What rank 0 exchanges in a step, and the bytes that it holds after it."""
    with job_on(layout) as job:
        with Exchanged() as exchanged:
            optimizer_step(job, Progress())
        return exchanged.calls, state_bytes(job)


def predicted(layout: Layout) -> tuple[Counter[Call], int]:
    units = data().facts.units
    assert units is not None
    every = exchanges(units, layout, accumulation=len(MICRO_BATCHES))
    calls = Counter((each.kind, each.processes, each.tensor_bytes // 4) for each in every)
    return calls, held(units, layout).state_bytes(element_bytes=8, optimizer_numbers=2)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_exchanges_and_leaves_what_the_plan_counts_with(strategy: str, world: int) -> None:
    layout = layout_of(strategy, world)
    assert exchanged_by(layout) == predicted(layout)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_together_hold_every_weight(strategy: str) -> None:
    layout, counts = layout_of(strategy, 8), list[int]()
    for rank in range(layout.world):
        with job_on(layout, rank=rank) as job:
            counts.append(sum(local(parameter).numel() for parameter in job.model.parameters()))
    units = data().facts.units
    assert units is not None
    copies = layout.world // layout.shard
    assert sum(counts) == copies * sum(weight.elements for unit in units for weight in unit)
    assert max(counts) == counts[0] == held(units, layout).parameters


def test_with_more_processes_than_rows_parts_are_filled_up() -> None:
    """A share of the totals would be less than what is held and sent."""
    layout = layout_of("fsdp", 1024)
    units = data().facts.units
    assert units is not None
    whole = [weight for unit in units for weight in unit]
    rows = {weight.shape[0] for weight in whole}
    assert max(rows) < layout.world
    assert held(units, layout).parameters == sum(part_elements(weight, 1024) for weight in whole)
    assert held(units, layout).parameters > 4 * sum(weight.elements for weight in whole) / layout.world


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_another_way_to_gather_would_be_told(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are kept after forward where they should not be, and the other way round."""
    from torch.distributed import fsdp

    cut: Callable[..., Any] = fsdp.fully_shard

    def other(module: Any, *, reshard_after_forward: bool, **options: Any) -> Any:
        return cut(module, reshard_after_forward=not reshard_after_forward, **options)

    monkeypatch.setattr(fsdp, "fully_shard", other)
    layout = layout_of(strategy, 8)
    (found, held_bytes), (calls, expected_bytes) = exchanged_by(layout), predicted(layout)
    assert found != calls and held_bytes == expected_bytes
    assert sum(found.values()) != sum(calls.values())


class HalfBlock(nn.Module):
    """A frozen layer in half precision and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).to(torch.bfloat16).requires_grad_(False)
        self.own = nn.Linear(16, 16)

    def forward(self, input_BC: torch.Tensor) -> torch.Tensor:
        return self.own(self.frozen(input_BC.bfloat16()).float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_torch_gathers_weights_in_their_own_types(strategy: str) -> None:
    model, layout = nn.Sequential(nn.Linear(16, 16), HalfBlock(), HalfBlock()), layout_of(strategy, 4)
    every = exchanges(weight_units(model), layout, accumulation=1)
    expected = Counter((each.kind, each.processes, each.tensor_bytes) for each in every)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world)
    try:
        shard_model(model, layout, device_type="cpu")
        with Exchanged() as exchanged:
            torch.autograd.backward(model(torch.zeros(1, 16)).sum())
    finally:
        dist.destroy_process_group()
    whole, half = 4 * (16 * 16 + 16), 2 * (16 * 16 + 16)
    mixed = ("all_gather", 4, whole + half)  # which torch gathers as bytes, and the rest as elements of fp32
    found = {call if call == mixed else (*call[:2], 4 * call[2]): n for call, n in exchanged.calls.items()}
    assert mixed in found and found == expected


class OfShards(LiveBytes):
    """Counts what operations on sharded tensors do with the parts of this rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if DTensor in types else super().__torch_dispatch__(func, types, args, kwargs)


def temporaries_of_update(layout: Layout) -> int:
    """Bytes on rank 0, of an update of many weights at once (foreach), torch's default on GPUs."""
    with job_on(layout) as job:
        optimizer, weights = local_shard(job.optimizer), list(job.model.parameters())
        for group in [*job.optimizer.param_groups, *optimizer.param_groups]:
            group.update(fused=False, foreach=True)
        for weight in filter(lambda each: each.requires_grad, weights):
            weight.grad = torch.zeros_like(weight)
        with OfShards() as live:
            for _ in range(2):
                start = live.position
                job.optimizer.step()
                add_state(optimizer, live)
            live.name_since(start, "update")
    trace = live.trace()
    own = {number for number, category in trace.categories.items() if category == "update"}
    return max(itertools.accumulate(size for number, size in trace.events if number in own))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp", "hsdp"])
def test_temporaries_of_the_update_are_sharded_as_its_state_is(strategy: str) -> None:
    """Both are of the parts of the rank: what a rank does not update, it has no temporaries for."""
    layout, units = layout_of(strategy, 8), data().facts.units
    assert units is not None
    whole = temporaries_of_update(Layout(strategy="single", world=1, shard=1))
    near = 0.1 if strategy == "zero1" else 0.03  # whole weights, of which one group is updated at a time
    assert temporaries_of_update(layout) == pytest.approx(whole * shares(units, layout)["update"], rel=near)
