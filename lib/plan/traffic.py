"""Communication of an optimizer step between devices, and its time: an estimate from published link rates.

Ring collectives: each of N processes sends and receives (N - 1) / N of the data of a reduce-scatter or an
all-gather, and twice that of an all-reduce (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lib.plan.gpus import Gpu
from lib.plan.sharding import DEVICES_PER_NODE, Units, part_elements
from lib.plan.types import SHARDS_WEIGHTS, Layout, Weight

ELEMENT_BYTES = 4  # weights and gradients are fp32
# Between nodes 400 Gbit/s per device, as in the reference designs of H100 machines.
NETWORK_BYTES_PER_SECOND = 50e9
HIDDEN_SHARE = 0.5  # share of the computation that communication overlaps with; an assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One collective of `processes`, which are among `among` consecutive devices.

    elements: of the whole tensor, with the padding to equal shards.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
    processes: int
    among: int
    elements: int

    def seconds(self, gpu: Gpu) -> float:
        """Estimate the seconds of this collective on a ring of `gpu`."""
        rate = gpu.link_bytes_per_second
        if self.among > DEVICES_PER_NODE:
            rate = min(rate, NETWORK_BYTES_PER_SECOND)
        sent = (self.processes - 1) / self.processes * ELEMENT_BYTES * self.elements
        return (2 if self.kind == "all_reduce" else 1) * sent / rate


def exchanges(units: Units, layout: Layout, *, accumulation: int) -> Iterator[Exchange]:
    """Return the collectives of each process in one step of `accumulation` micro-batches.

    Replicas (ddp, zero1) average all gradients at once here; torch does so in buckets of 25 MiB, the first of
    1. What the two devices of a split exchange, a few vectors per sample, is not counted.
    """
    if layout.strategy in SHARDS_WEIGHTS:
        yield from _of_parts(units, layout, accumulation)
    elif layout.world > 1:
        trained = [weight for unit in units for weight in unit if weight.trainable]
        elements = sum(weight.elements for weight in trained)
        everyone = {"processes": layout.world, "among": layout.devices}
        yield Exchange(kind="all_reduce", elements=elements, **everyone)
        if layout.strategy == "zero1":  # each process broadcasts the weights that it has updated
            for weight in trained:
                yield Exchange(kind="broadcast", elements=weight.elements, **everyone)


def traffic_seconds(units: Units, layout: Layout, gpu: Gpu, *, accumulation: int) -> float:
    """Estimate the seconds of all communication in one step of `accumulation` micro-batches."""
    return sum(each.seconds(gpu) for each in exchanges(units, layout, accumulation=accumulation))


def exposed_seconds(traffic: float, *, compute: float) -> float:
    """Return the seconds of communication that do not overlap with the computation."""
    return max(0.0, traffic - HIDDEN_SHARE * compute)


def _of_parts(units: Units, layout: Layout, accumulation: int) -> Iterator[Exchange]:
    group = {"processes": layout.shard, "among": layout.shard}
    copies = layout.world // layout.shard
    trained = [trained for unit in units if (trained := [weight for weight in unit if weight.trainable])]
    for _ in range(accumulation):
        for number, unit in enumerate(units):
            # One all-gather for forward and backward, or one each; the root unit (first) stays gathered.
            times = 1 if number == 0 or layout.strategy == "zero2" else 2
            for _ in range(times if unit else 0):
                yield Exchange(kind="all_gather", elements=_filled_up(unit, layout.shard), **group)
        for unit in trained:
            yield Exchange(kind="reduce_scatter", elements=_filled_up(unit, layout.shard), **group)
    for unit in trained if copies > 1 else []:
        elements = _filled_up(unit, layout.shard) // layout.shard
        yield Exchange(kind="all_reduce", processes=copies, among=layout.world, elements=elements)


def _filled_up(weights: Sequence[Weight], shard: int) -> int:
    return shard * sum(part_elements(weight, shard) for weight in weights)
