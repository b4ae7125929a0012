"""Every way to spread a run over processes computes what one computes: real process groups, float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.devices.base import Backend
from lib.nn.weights import is_adapter
from lib.plan.sharding import held, layouts
from lib.plan.types import Layout
from tests.e2e.sharded_worker import (
    ACCUMULATIONS,
    FROZEN,
    LOADED,
    SAVED_BY,
    STEPS,
    data,
    frozen_weights,
    gradients_of,
    load,
    saving_job,
    trains_rest,
)
from tests.e2e.workers import run_worker
from tests.support.once import made_once

pytestmark = pytest.mark.slow

EXACT = 1e-12
ALONE = Layout(strategy="single", world=1, shard=1)
WAYS = {world: ["ddp", "zero1", "zero2", "fsdp"] for world in (2, 3)} | {
    4: ["ddp", "zero1", "zero2", "fsdp", "hsdp"]
}
LOADERS = (3, pytest.param(2, marks=pytest.mark.long))  # shards of unequal length, and equal ones
EVERY_WAY = pytest.mark.parametrize(
    ("world", "way"),
    [
        pytest.param(world, way, marks=[] if world == 3 or way == "hsdp" else [pytest.mark.long])
        for world, ways in WAYS.items()
        for way in ways
    ],
)

Outcome = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four processes have left states."""
    return made_once(
        tmp_path_factory, "sharded", lambda path: run_worker("sharded_worker", path, SAVED_BY, path, "all")
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, saved: Path) -> Callable[[int], Outcome]:
    """What so many processes have found."""

    @cache
    def found_by(world: int) -> Outcome:
        directory = saved
        if world != SAVED_BY:
            directory = made_once(
                tmp_path_factory,
                f"sharded-{world}",
                lambda path: run_worker("sharded_worker", path, world, saved, "all"),
            )
        outcome: Outcome = torch.load(directory / f"{world}.pt")
        return outcome

    return found_by


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Tensor]]:
    """The gradients of one process, by accumulation."""
    return {
        accumulation: gradients_of(ALONE, accumulation, backend=Backend("cpu"))
        for accumulation in ACCUMULATIONS
    }


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest of a difference of two elements, by the largest element."""
    assert one.keys() == other.keys()
    largest = max(float(tensor.abs().max()) for tensor in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@EVERY_WAY
def test_gradients_are_those_of_one_process(
    world: int,
    way: str,
    accumulation: int,
    outcomes: Callable[[int], Outcome],
    alone: dict[int, dict[str, Tensor]],
    request: pytest.FixtureRequest,
) -> None:
    outcome = outcomes(world) if trains_rest(world, way, "all") else request.getfixturevalue("more")
    found = outcome["gradients"][way, accumulation]
    assert difference(alone[1], found) <= EXACT
    assert difference(alone[1], alone[accumulation]) <= EXACT


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What four processes train in the ways that `outcomes` leaves out."""
    make = lambda path: run_worker("sharded_worker", path, SAVED_BY, path, "more")  # noqa: E731
    outcome: Outcome = torch.load(made_once(tmp_path_factory, "sharded-more", make) / f"{SAVED_BY}.pt")
    return outcome


@cache
def frozen_alone(what: str) -> dict[str, Tensor]:
    return frozen_weights(ALONE, Backend("cpu"), what)


@pytest.mark.parametrize("what", FROZEN)
@EVERY_WAY
def test_frozen_and_slow_layers_are_those_of_one_process(
    world: int,
    way: str,
    what: str,
    outcomes: Callable[[int], Outcome],
    request: pytest.FixtureRequest,
) -> None:
    alone = frozen_alone(what)
    found = outcomes(world) if trains_rest(world, way, "all") else request.getfixturevalue("more")
    assert difference(alone, found[what, way]) <= 1e-9
    start = saving_job(ALONE, Backend("cpu"), **FROZEN[what]).model.state_dict()
    moved = {name for name, value in start.items() if not torch.equal(value, alone[name])}
    kept = {name for name in start if "mlp_in" in name or "token" in name}
    if what == "adapters":
        kept = {name for name in start if not is_adapter(name) and "position" not in name}
    assert moved == start.keys() - kept if what == "adapters" else moved and not moved & kept


@pytest.mark.parametrize("way", WAYS[3])
def test_a_mean_of_means_would_be_told(
    way: str, outcomes: Callable[[int], Outcome], alone: dict[int, dict[str, Tensor]]
) -> None:
    assert difference(alone[1], outcomes(3)["mean of means", way]) > 1e-3


@pytest.mark.parametrize("way", WAYS[4])
def test_what_is_held_is_what_was_predicted(way: str, outcomes: Callable[[int], Outcome]) -> None:
    units = data().facts.units
    assert units is not None
    layout = next(each for each in layouts(4) if each.strategy == way)
    expected = held(units, layout).state_bytes(element_bytes=8, optimizer_numbers=2)
    assert outcomes(4)["bytes"][way] == expected
    assert (expected < outcomes(4)["bytes"]["ddp"]) == (way != "ddp")


@pytest.mark.parametrize("way", WAYS[4])
def test_what_is_saved_beside_training_is_what_it_would_wait_for(
    way: str, outcomes: Callable[[int], Outcome]
) -> None:
    at_once, beside = outcomes(4)["at once", way], outcomes(4)["beside", way]
    assert beside == at_once and len(set(beside)) == len(beside) == STEPS


@pytest.mark.parametrize("world", LOADERS)
def test_what_four_have_saved_is_the_same_for_every_way_and_number(
    world: int, outcomes: Callable[[int], Outcome], saved: Path
) -> None:
    for way in LOADED:
        assert outcomes(world)["digests"][way] == outcomes(4)["digests"][way], way
    one: Outcome = {"digests": {}, "further": {}}
    load(ALONE, Backend("cpu"), saved, one)
    assert one["digests"]["single"] == outcomes(4)["digests"]["fsdp"]
    for way in LOADED:
        assert difference(one["further"]["single"], outcomes(world)["further"][way]) < 1e-9, way
