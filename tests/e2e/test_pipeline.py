"""A pipeline trains what one process trains: real process groups, float64."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.devices.base import Backend
from lib.plan.stages import stages_of
from lib.runs.directory import checkpoint_name
from tests.e2e.pipeline_worker import (
    CHAINS,
    EACH,
    LONG,
    OF_CHAINS,
    OF_WORLD,
    STEPS,
    data_of,
    job_of,
    layout_of,
    optimize,
    outcome,
)
from tests.e2e.workers import run_worker
from tests.support.once import made_once
from tests.support.training import MemoryRecord, largest_difference
from train.job import Progress, evaluate
from train.loop import state_dict

pytestmark = pytest.mark.slow

EXACT = 1e-12


def left_by(factory: pytest.TempPathFactory, part: str) -> Path:
    """What the worker leaves of `part`."""
    return made_once(factory, f"pipeline-{part}", lambda path: run_worker("pipeline_worker", path, part))


@cache
def alone(name: str) -> dict[str, Any]:
    return outcome(name, Backend("cpu"))


def without_kind(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "kind"}


def without_noise(name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the bias of keys for Adam-atan2: no loss depends on it, and a step follows the rounding."""
    found = {key: value.clone() for key, value in state.items()}
    for key, value in found.items() if name == "atan2" else ():
        if key.endswith("qkv.bias"):
            value.unflatten(0, (3, -1))[1] = 0
    return found


@pytest.mark.parametrize(
    ("part", "world", "name"),
    [
        pytest.param(part, world, name, marks=[pytest.mark.long] if part == "sweep" else [])
        for part, worlds in OF_WORLD.items()
        for world, names in worlds.items()
        for name in names
    ],
)
def test_stages_train_what_one_process_trains(
    part: str, world: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Weights, averages, state of the optimizer, losses and evaluations."""
    expected = alone(name)
    found = torch.load(left_by(tmp_path_factory, part) / f"{world}.pt")[name]
    # Sums of float32 in another order; bf16 rounds what comes of them to 3 digits, by the CPU.
    exact = 1e-4 if name == "bf16" else EXACT
    for kept in ("model", "ema"):
        states = [without_noise(name, each["state"][kept]) for each in (expected, found)]
        assert largest_difference(*states) <= exact, kept
    numbers = [state["optimizer"]["state"] for state in (expected["state"], found["state"])]
    assert numbers[0].keys() == numbers[1].keys() and numbers[0]
    for one, other in zip(*(of.values() for of in numbers), strict=True):
        assert largest_difference(one, other) <= exact
    assert found["result"] == pytest.approx(expected["result"], rel=exact)
    evaluated = [[row for row in each["rows"] if row["kind"] == "eval"] for each in (expected, found)]
    assert len(evaluated[0]) == len(evaluated[1]) == STEPS
    for one, other in zip(*evaluated, strict=True):
        assert without_kind(other) == pytest.approx(without_kind(one), rel=exact)
    losses = [[row["loss"] for row in each["rows"] if row["kind"] == "train"] for each in (expected, found)]
    assert losses[1] == pytest.approx(losses[0], rel=exact) and len(losses[0]) == STEPS


@pytest.mark.parametrize(("world", "name"), [(2, "ragged"), (2, "labels"), (3, "ragged"), (4, "labels")])
def test_stages_hold_what_was_predicted(
    world: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout = layout_of(world)
    stages = stages_of(data_of(name).facts, layout)
    held = [stage.parameters for stage in stages] * layout.replicas
    found = torch.load(left_by(tmp_path_factory, "cases") / f"{world}.pt")[name]
    assert found["held"] == held
    assert [stage.blocks for stage in stages] == {2: [2, 2], 3: [2, 1, 1], 4: [2, 2]}[world]


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Any]]:
    """State and evaluation of one process after each part of the steps."""
    job, progress = job_of("unequal", Backend("cpu"), MemoryRecord(), **LONG), Progress()
    found = []
    for _ in range(3):
        optimize(job, progress, steps=EACH)
        state = state_dict(job, progress)
        found.append({"state": copy.deepcopy(state), "result": evaluate(job)})
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("model", "ema"):
        assert largest_difference(expected["state"][part], found["state"][part]) <= EXACT, part
    assert found["state"]["progress"]["step"] == expected["state"]["progress"]["step"]
    assert found["result"] == pytest.approx(expected["result"], rel=EXACT)


@pytest.mark.parametrize(
    ("part", "name", "form"),
    [
        pytest.param(part, name, form, marks=[pytest.mark.long] if part == "other checkpoints" else [])
        for part, chains in OF_CHAINS.items()
        for name, forms in chains.items()
        for form in forms
    ],
)
def test_a_run_goes_on_with_other_layouts(
    part: str,
    name: str,
    form: str,
    tmp_path_factory: pytest.TempPathFactory,
    undisturbed: list[dict[str, Any]],
) -> None:
    saved = left_by(tmp_path_factory, part)
    for (world, _), expected in zip(CHAINS[name], undisturbed, strict=True):
        assert_same(torch.load(saved / f"{name}-{world}.pt")[form], expected)
    files = {path.name for path in (saved / f"{name}-{form}" / "ckpt" / checkpoint_name(EACH)).iterdir()}
    parts = set() if form == "full" else {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert files == {"manifest.json", "state.pt", *parts}


def test_a_killed_stage_ends_the_others_and_the_run_resumes(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: list[dict[str, Any]]
) -> None:
    assert_same(torch.load(left_by(tmp_path_factory, "checkpoints") / "resumed.pt"), undisturbed[-1])
