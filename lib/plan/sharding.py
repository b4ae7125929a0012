"""Sharded state of one process, weight by weight, and the communication of an optimizer step. Pure.

Weights are sharded along dimension 0, so the largest shard has ceil(rows / processes) rows, which is more
than the quotient of the totals where there are fewer rows than processes. Formulas: Rajbhandari et al. 2020
(arXiv:1910.02054) for what is sharded, torch's fully_shard and ZeroRedundancyOptimizer for how.

Collectives are rings: each of N processes sends and receives (N - 1) / N of the data of a reduce-scatter or
an all-gather, and twice that of an all-reduce (Patarasuk and Yuan 2009). Link rates within a node are
published ones, and that of the network between nodes is requested. NCCL's rings use the network adapters of
all devices of a node together, a send only one (NVIDIA/nccl issue 495, NVIDIA/nccl-tests issue 267).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from lib.config import Config
from lib.plan.gpus import Gpu
from lib.plan.types import SHARDS_WEIGHTS, Branch, ConfigView, Layout, Weight

Units: TypeAlias = Sequence[Sequence[Weight]]

DEVICES_PER_NODE = 8  # for machines known by a number of devices only
ELEMENT_BYTES = 4  # weights and gradients are fp32
NETWORK_GBIT = 400.0  # of each device, as in reference designs of H100 machines; for configurations of others
HIDDEN_SHARE = 0.5  # share of the computation that communication overlaps with; an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class RankElements:
    """Elements on the process that holds the most.

    parameters, gradients, optimizer: held permanently; the last for one value of state per weight.
    gathered_parameters, gathered_gradients: held in addition, at most, while a micro-batch is computed.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_parameters: int = 0
    gathered_gradients: int = 0

    def state_bytes(self, *, element_bytes: int, optimizer_numbers: int) -> int:
        """Return bytes of weights, gradients and `optimizer_numbers` values of optimizer state per weight."""
        return element_bytes * (self.parameters + self.gradients + optimizer_numbers * self.optimizer)


def layouts(world: int, *, per_node: int = 0) -> Iterator[Layout]:
    """Return the parallelism strategies for `world` processes, `per_node` on a node, the simplest first."""
    if world == 1:
        yield Layout(strategy="single", world=1, shard=1)
        return
    yield Layout(strategy="ddp", world=world, shard=1)
    yield Layout(strategy="zero1", world=world, shard=1)
    yield Layout(strategy="zero2", world=world, shard=world)
    yield Layout(strategy="fsdp", world=world, shard=world)
    group = group_of(world, per_node=per_node)
    if group is not None:
        yield Layout(strategy="hsdp", world=world, shard=group)


def splits_over(devices: int, branches: Sequence[Branch]) -> Iterator[Layout]:
    """Return the layouts of two frozen models on all of `devices`, those with the most processes first.

    A process has 2 to DEVICES_PER_NODE devices, divided between the models so that the slower one is as fast
    as it can be. Where both numbers have a common divisor, smaller processes do the same. Empty without two
    `branches`.
    """
    if not branches:
        return
    first, second = (branch.flop_per_sample for branch in branches)
    for each in range(2, min(devices, DEVICES_PER_NODE) + 1):
        if devices % each == 0:
            with_first = min(range(each - 1, 0, -1), key=lambda own: max(first / own, second / (each - own)))
            if math.gcd(with_first, each) == 1:
                pair = (with_first, each - with_first)
                yield Layout(strategy="split", world=devices // each, shard=1, branch_devices=pair)


def group_of(world: int, *, per_node: int = 0) -> int | None:
    """Return processes per replica of hsdp: those of a node, or half of all; None where neither fits."""
    node = per_node or DEVICES_PER_NODE
    if world > node > 1:
        return node if world % node == 0 else None
    return world // 2 if world >= 4 and world % 2 == 0 else None


def held(units: Units, layout: Layout) -> RankElements:
    """Return what the fullest process holds of a model made of `units`."""
    weights = [weight for unit in units for weight in unit]
    trained = [weight for weight in weights if weight.trainable]
    parameters, gradients = _elements(weights), _elements(trained)
    if layout.strategy not in SHARDS_WEIGHTS:
        optimizer = _fullest(trained, layout.world) if layout.strategy == "zero1" else gradients
        return RankElements(parameters=parameters, gradients=gradients, optimizer=optimizer)
    root, *others = units
    largest = max(map(_elements, others), default=0)
    # The unit that is computed, and the next one, prefetched.
    to_local = _elements(root) + min(2, len(others)) * largest
    own = sum(part_elements(weight, layout.shard) for weight in trained)
    return RankElements(
        parameters=sum(part_elements(weight, layout.shard) for weight in weights),
        gradients=own,
        optimizer=own,
        gathered_parameters=parameters if layout.strategy == "zero2" else to_local,
        # Unsharded gradients of one unit, and their copy in the reduce-scatter buffer.
        gathered_gradients=2 * max(_elements(w for w in unit if w.trainable) for unit in units),
    )


def part_elements(weight: Weight, shard: int) -> int:
    """Return elements of the largest shard of `weight` when its rows are split over `shard` processes."""
    if not weight.shape:
        return 1
    return math.ceil(weight.shape[0] / shard) * math.prod(weight.shape[1:])


def shares(units: Units, layout: Layout) -> Mapping[str, float]:
    """Return the factor on each kind of memory of an unsharded process; kinds not named do not change."""
    alone = Layout(strategy="single", world=1, shard=1)
    whole, own = held(units, alone), held(units, layout)
    # Weights may be of several types: each as a row of its bytes.
    sized = [[replace(w, shape=(*(w.shape or (1,)), w.element_bytes)) for w in unit] for unit in units]
    own_bytes = held(sized, layout)
    return {
        "parameters": (own_bytes.parameters + own_bytes.gathered_parameters) / held(sized, alone).parameters,
        "gradients": (own.gradients + own.gathered_gradients) / max(1, whole.gradients),
        **dict.fromkeys(("optimizer", "update"), own.optimizer / max(1, whole.optimizer)),
        "averages": own.gradients / max(1, whole.gradients),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Rates between devices in bytes per second, in one direction.

    per_node: devices of each node. network_bytes_per_second: between nodes, of the adapter of each device.
    """

    node_bytes_per_second: float
    network_bytes_per_second: float
    per_node: int

    @classmethod
    def of(cls, gpu: Gpu, config: ConfigView, *, per_node: int) -> Links:
        """Return the links of devices `gpu`. per_node: as of Hardware."""
        gbit = config.launch.dist_network_gbit if isinstance(config, Config) else NETWORK_GBIT
        return cls(
            node_bytes_per_second=gpu.link_bytes_per_second,
            network_bytes_per_second=gbit * 1e9 / 8,
            per_node=per_node or DEVICES_PER_NODE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange between `processes`, which are among `among` consecutive devices.

    tensor_bytes: of the whole tensor, with the padding to equal shards.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "send"]
    processes: int
    among: int
    tensor_bytes: int

    def seconds(self, links: Links) -> float:
        """Estimate the seconds of this exchange, collectives on a ring."""
        rate = links.node_bytes_per_second
        if self.among > links.per_node:
            adapters = max(1, self.processes * links.per_node // self.among)  # of a node, in use
            rate = min(rate, adapters * links.network_bytes_per_second)
        part = 1 if self.kind == "send" else (self.processes - 1) / self.processes
        return (2 if self.kind == "all_reduce" else 1) * part * self.tensor_bytes / rate


def exchanges(units: Units, layout: Layout, *, accumulation: int) -> Iterator[Exchange]:
    """Return the collectives of each process in one step of `accumulation` micro-batches.

    Replicas (ddp, zero1) average all gradients at once here; torch does so in buckets of 25 MiB, the first of
    1. What the devices of a split exchange, a few vectors per sample, is not counted.
    """
    if layout.strategy in SHARDS_WEIGHTS:
        yield from _of_parts(units, layout, accumulation)
    elif layout.world > 1:
        trained = [weight for unit in units for weight in unit if weight.trainable]
        sizes = [weight.element_bytes * weight.elements for weight in trained]
        everyone = {"processes": layout.world, "among": layout.devices}
        yield Exchange(kind="all_reduce", tensor_bytes=sum(sizes), **everyone)
        if layout.strategy == "zero1":  # each process broadcasts the weights that it has updated
            for size in sizes:
                yield Exchange(kind="broadcast", tensor_bytes=size, **everyone)


def traffic_seconds(units: Units, layout: Layout, links: Links, *, accumulation: int) -> float:
    """Estimate the seconds of all communication in one step of `accumulation` micro-batches."""
    return sum(each.seconds(links) for each in exchanges(units, layout, accumulation=accumulation))


def exposed_seconds(traffic: float, *, compute: float) -> float:
    """Return the seconds of communication that do not overlap with the computation."""
    return max(0.0, traffic - HIDDEN_SHARE * compute)


def _fullest(weights: Sequence[Weight], world: int) -> int:
    """Return elements on the fullest process when whole weights are distributed greedily, the largest first.

    As torch's ZeroRedundancyOptimizer does, one parameter group after the other.
    """
    sizes = [0] * world
    for group in ([w for w in weights if len(w.shape) >= 2], [w for w in weights if len(w.shape) < 2]):
        for weight in sorted(group, key=lambda weight: weight.elements, reverse=True):
            sizes[sizes.index(min(sizes))] += weight.elements
    return max(sizes)


def _elements(weights: Iterator[Weight] | Sequence[Weight]) -> int:
    return sum(weight.elements for weight in weights)


def _of_parts(units: Units, layout: Layout, accumulation: int) -> Iterator[Exchange]:
    group = {"processes": layout.shard, "among": layout.shard}
    copies = layout.world // layout.shard
    trained = [trained for unit in units if (trained := [weight for weight in unit if weight.trainable])]
    for _ in range(accumulation):
        for number, unit in enumerate(units):
            # One all-gather for forward and backward, or one each; the root unit (first) stays gathered.
            times = 1 if number == 0 or layout.strategy == "zero2" else 2
            for _ in range(times if unit else 0):
                yield Exchange(kind="all_gather", tensor_bytes=_filled_up(unit, layout.shard), **group)
        for unit in trained:
            yield Exchange(kind="reduce_scatter", tensor_bytes=_filled_up(unit, layout.shard), **group)
    for unit in trained if copies > 1 else []:
        own = _filled_up(unit, layout.shard) // layout.shard
        yield Exchange(kind="all_reduce", processes=copies, among=layout.world, tensor_bytes=own)


def _filled_up(weights: Sequence[Weight], shard: int) -> int:
    """Return the bytes of `weights` in their own types, with the padding to equal shards."""
    return shard * sum(weight.element_bytes * part_elements(weight, shard) for weight in weights)
