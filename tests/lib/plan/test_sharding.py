"""What each process of several holds, and what it sends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.memory.live import Trace
from lib.plan.gpus import gpu_of
from lib.plan.sharding import (
    NETWORK_GBIT,
    Links,
    Units,
    exchanges,
    exposed_seconds,
    group_of,
    held,
    layouts,
    part_elements,
    shares,
    traffic_seconds,
)
from lib.plan.types import SHARDS_WEIGHTS, Layout, Weight
from tests.support.configs import make_config

ALONE = Layout(strategy="single", world=1, shard=1)
H100 = gpu_of("h100-80g")
SHAPES = st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple)
UNITS = st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=4).map(
    lambda units: [[Weight(shape, True) for shape in unit] for unit in units]
)
# An embedding, and two blocks of a matrix and a bias.
SMALL: Units = [[Weight((10, 4), True)], *([[Weight((6, 4), True), Weight((6,), True)]] * 2)]


def layout(strategy: str, world: int, shard: int = 1) -> Layout:
    return (
        next(each for each in layouts(world) if each.strategy == strategy)
        if shard == 1
        else Layout(
            strategy=strategy,
            world=world,
            shard=shard,  # type: ignore[arg-type]
        )
    )


# (strategy, processes) -> elements of weights, gradients and each number of the optimizer
TABLE = {
    ("ddp", 4): (100, 100, 100),
    ("zero1", 4): (100, 100, 40),  # the embedding alone is more than a quarter
    ("zero2", 4): (12 + 2 * (8 + 2), 32, 32),  # 10 rows over 4 are 3 at most, 6 are 2
    ("fsdp", 4): (32, 32, 32),
    ("hsdp", 4): (20 + 2 * (12 + 3), 50, 50),  # groups of two
    ("fsdp", 16): (4 + 2 * (4 + 1), 14, 14),  # more processes than rows
}


@pytest.mark.parametrize(("strategy", "world"), TABLE)
def test_the_table_of_what_is_held(strategy: str, world: int) -> None:
    found = held(SMALL, layout(strategy, world))
    assert (found.parameters, found.gradients, found.optimizer) == TABLE[strategy, world]


def test_what_is_put_together_comes_on_top() -> None:
    whole = 100
    assert held(SMALL, layout("zero2", 4)).gathered_parameters == whole
    # What is in no block, the block that is computed and the next one.
    assert held(SMALL, layout("fsdp", 4)).gathered_parameters == 40 + 2 * 30
    assert held(SMALL, layout("fsdp", 4)).gathered_gradients == 2 * 40
    assert held(SMALL[:2], layout("fsdp", 4)).gathered_parameters == 40 + 30
    assert held(SMALL, layout("zero1", 4)).gathered_parameters == 0


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    units = [[replace(SMALL[0][0], trainable=False)], *SMALL[1:]]
    for strategy in ("ddp", "zero1", "fsdp"):
        frozen, trained = held(units, layout(strategy, 2)), held(SMALL, layout(strategy, 2))
        assert frozen.parameters == trained.parameters
        assert frozen.gradients < trained.gradients and frozen.optimizer < trained.optimizer


@given(units=UNITS, world=st.integers(2, 64))
def test_more_processes_never_hold_more_and_all_together_hold_everything(units: Units, world: int) -> None:
    whole = held(units, ALONE)
    for each in layouts(world):
        own = held(units, each)
        assert own.parameters <= whole.parameters and own.optimizer <= whole.optimizer
        copies = world if each.strategy in ("ddp", "zero1") else world // each.shard
        assert own.parameters * world >= whole.parameters * copies
        copies = 1 if each.strategy == "zero1" else copies
        assert own.optimizer * world >= whole.optimizer * copies
        assert (each.strategy in SHARDS_WEIGHTS) == (own.gathered_parameters > 0)
    assert dict(shares(units, ALONE)) == dict.fromkeys(
        ("parameters", "gradients", "optimizer", "averages", "update"), 1
    )


def test_averages_are_cut_as_the_weights_are_and_never_put_together() -> None:
    assert shares(SMALL, layout("fsdp", 4))["averages"] == 32 / 100
    assert shares(SMALL, layout("zero1", 4))["averages"] == 1


@given(shape=SHAPES, shard=st.integers(1, 1024))
def test_the_largest_part_has_the_rows_that_no_other_has_more_of(shape: tuple[int, ...], shard: int) -> None:
    rows = [len(range(start, shape[0], shard)) for start in range(shard)]  # dealt out one by one
    assert part_elements(Weight(shape, True), shard) == max(rows) * math.prod(shape[1:])


def test_the_ways_are_listed_from_the_simplest() -> None:
    assert [each.strategy for each in layouts(1)] == ["single"]
    assert [each.strategy for each in layouts(2)] == ["ddp", "zero1", "zero2", "fsdp"]
    assert [each.strategy for each in layouts(4)] == ["ddp", "zero1", "zero2", "fsdp", "hsdp"]
    assert [group_of(world) for world in (2, 3, 4, 6, 8, 12, 16, 64)] == [None, None, 2, 3, 4, None, 8, 8]


def test_what_is_exchanged_in_a_step() -> None:
    def found(strategy: str, *, world: int = 4, accumulation: int = 1) -> list[tuple[str, int, int]]:
        every = exchanges(SMALL, layout(strategy, world), accumulation=accumulation)
        return [(each.kind, each.processes, each.tensor_bytes // 4) for each in every]

    assert found("ddp", accumulation=5) == [("all_reduce", 4, 100)]
    sent = [("broadcast", 4, elements) for elements in (40, 24, 6, 24, 6)]
    assert found("zero1") == [("all_reduce", 4, 100), *sent]
    # 10 rows over 4 are 3 each and 12 together, 6 are 2 and 8.
    root, block = 12 * 4, 8 * 4 + 8
    gathered = [("all_gather", 4, elements) for elements in (root, block, block)]
    reduced = [("reduce_scatter", 4, elements) for elements in (root, block, block)]
    assert found("zero2", accumulation=2) == [*gathered, *reduced] * 2
    again = [("all_gather", 4, elements) for elements in (root, block, block, block, block)]
    assert found("fsdp") == [*again, *reduced]
    halves = [(kind, 2, elements) for kind, _, elements in found("fsdp", world=2)]
    parts = [("all_reduce", 2, elements // 2) for elements in (10 * 4, 6 * 4 + 6, 6 * 4 + 6)]
    assert found("hsdp", accumulation=2) == [*halves, *halves, *parts]
    assert list(exchanges(SMALL, ALONE, accumulation=2)) == []


def test_frozen_weights_are_gathered_and_nothing_else() -> None:
    frozen = [[replace(weight, trainable=False) for weight in SMALL[0]], *SMALL[1:]]
    for strategy, kind in (("ddp", "all_reduce"), ("zero1", "broadcast"), ("zero2", "reduce_scatter")):
        way = layout(strategy, 2)
        fewer, all_of_them = (
            sum(each.tensor_bytes for each in exchanges(units, way, accumulation=1) if each.kind == kind)
            for units in (frozen, SMALL)
        )
        assert all_of_them - fewer == 4 * 40
    nothing_of_its_own: Units = [[], *SMALL[1:]]
    assert len(list(exchanges(nothing_of_its_own, layout("zero2", 2), accumulation=1))) == 2 + 2


def test_how_long_an_exchange_takes() -> None:
    def seconds(strategy: str, *, world: int = 4, accumulation: int = 1, **rates: Any) -> float:
        return traffic_seconds(SMALL, layout(strategy, world), links_of(**rates), accumulation=accumulation)

    ring = 3 / 4 * 400 / 450e9  # 100 elements of 4 bytes
    assert seconds("ddp") == pytest.approx(2 * ring) == seconds("ddp", accumulation=5)
    assert seconds("zero1") == pytest.approx(3 * ring)
    assert seconds("zero2", accumulation=2) == pytest.approx(2 * 2 * 1.28 * ring)
    assert seconds("fsdp", accumulation=2) == pytest.approx(2 * (2.08 + 1.28) * ring)
    # Between two nodes a ring goes through the adapters of all devices of a node.
    ring = 15 / 16 * 400
    assert seconds("ddp", world=16) == pytest.approx(2 * ring / (8 * 50e9))
    assert seconds("ddp", world=16, gbit=25) == pytest.approx(2 * ring / (8 * 25e9 / 8))
    assert seconds("ddp", world=16, gbit=800) == pytest.approx(2 * ring / 450e9), "links are slower"
    assert seconds("ddp", world=8, gbit=25) == seconds("ddp", world=8), "on one node"
    # Replicas of groups that are nodes go through one adapter each, and only gradients do.
    own = [each for each in exchanges(SMALL, layout("hsdp", 16), accumulation=1) if each.among == 16]
    assert own[0].seconds(links_of(gbit=25)) == pytest.approx(own[0].tensor_bytes / (25e9 / 8))
    assert seconds("hsdp", world=16, gbit=25) < seconds("fsdp", world=16, gbit=25)
    assert exposed_seconds(3.0, compute=4.0) == 1.0 and exposed_seconds(1.0, compute=4.0) == 0.0


def links_of(*, gbit: float = 400.0, per_node: int = 0) -> Links:
    return Links.of(H100, make_config("lenet5", dist_network_gbit=gbit), per_node=per_node)


def test_the_default_network_is_that_of_other_configurations() -> None:
    assert make_config("lenet5").launch.dist_network_gbit == NETWORK_GBIT


def test_weights_are_sent_in_their_own_types() -> None:
    """Frozen layers in half precision: half of their bytes are gathered, and none is reduced."""
    halved = [
        SMALL[0],
        *([replace(each, trainable=False, element_bytes=2) for each in unit] for unit in SMALL[1:]),
    ]
    found, whole = (
        [each for each in exchanges(units, layout("fsdp", 4), accumulation=1) if each.kind == "all_gather"]
        for units in (halved, SMALL)
    )
    root, *blocks = found
    assert root == whole[0] and [2 * each.tensor_bytes for each in blocks] == [
        each.tensor_bytes for each in whole[1:]
    ]


def test_whole_weights_are_dealt_out_the_largest_first() -> None:
    units = [[Weight((rows, 10), True) for rows in (1, 2, 3)]]
    assert held(units, layout("zero1", 2)).optimizer == 30, "3 to one, 2 and 1 to the other"


def test_the_moment_of_the_peak_is_another_where_some_memory_is_in_parts() -> None:
    gradients, activations = 0, 1
    events = ((gradients, 100), (gradients, -100), (activations, 80), (activations, -80))
    trace = Trace(events, {gradients: "gradients", activations: "activations"})
    assert trace.at_peak() == {"gradients": 100} and trace.peak_bytes == 100
    assert trace.at_peak({"gradients": 0.25}) == {"activations": 80}


def test_nodes_of_few_devices_have_slow_links_and_groups_of_their_size() -> None:
    assert [group_of(8, per_node=4), group_of(16, per_node=4), group_of(6, per_node=4)] == [4, 4, None]
    assert group_of(8) == 4 and group_of(16) == 8
    one, two, default = (
        traffic_seconds(SMALL, layout("ddp", 8), links_of(per_node=each), accumulation=1)
        for each in (8, 4, 0)
    )
    assert two > one == default
