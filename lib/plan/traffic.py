"""How long the exchange between devices takes in an optimizer step: an estimate, from rates of papers.

Rings: of N processes each sends and receives (N - 1) / N of what is reduced in parts or gathered, and twice
that of what is reduced whole (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lib.gpus import Gpu
from lib.plan.sharding import DEVICES_PER_NODE, Held
from lib.plan.types import SHARDS_WEIGHTS, Layout

ELEMENT_BYTES = 4  # weights and gradients are fp32
HIDDEN_SHARE = 0.5  # of the computation: that long an exchange goes on beside it. An assumption


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes per second that one device sends while it receives as many."""

    within_node: float
    between_nodes: float


# One direction, from the vendors' papers: NVLink, NVLink bridges of none, Infinity Fabric; the others have
# PCIe 4.0 x16. Between nodes 400 Gbit/s for each device, as in the reference designs of H100 machines.
_PCIE = 32e9
_WITHIN: Mapping[str, float] = MappingProxyType(
    {
        "b200": 900e9,
        "gh200-96g": 450e9,
        "h200": 450e9,
        "h100-80g": 450e9,
        "a100-40g": 300e9,
        "a100-80g": 300e9,
        "v100-16g": 150e9,
        "v100-32g": 150e9,
        "mi300x": 448e9,
        "mi325x": 448e9,
        "mi250x": 200e9,
    }
)
_BETWEEN = 50e9


def links_of(gpu: Gpu) -> Links:
    """What is assumed of the links of a GPU of the catalogue."""
    within = _WITHIN.get(gpu.key, _PCIE)
    return Links(within_node=within, between_nodes=min(within, _BETWEEN))


def traffic_seconds(layout: Layout, own: Held, whole: Held, links: Links, *, accumulation: int) -> float:
    """Seconds of all exchange in one step of `accumulation` micro-batches.

    own, whole: what one process holds, and what it would without any others.
    """
    weights, gradients = ELEMENT_BYTES * whole.parameters, ELEMENT_BYTES * whole.gradients
    rate = links.within_node if layout.world <= DEVICES_PER_NODE else links.between_nodes
    if layout.strategy not in SHARDS_WEIGHTS:
        updated = weights if layout.strategy == "zero1" else 0  # each process sends what it has updated
        return _part(layout.world) * (2 * gradients + updated) / rate
    gathers = 1 if layout.strategy == "zero2" else 2
    group_rate = links.within_node if layout.shard <= DEVICES_PER_NODE else links.between_nodes
    seconds = accumulation * _part(layout.shard) * (gathers * weights + gradients) / group_rate
    copies = layout.world // layout.shard
    return seconds + 2 * _part(copies) * ELEMENT_BYTES * own.gradients / rate


def exposed_seconds(traffic: float, *, compute: float) -> float:
    """What of the exchange is not hidden behind the computation."""
    return max(0.0, traffic - HIDDEN_SHARE * compute)


def _part(processes: int) -> float:
    return (processes - 1) / processes
