"""The format of checkpoints follows from the strategy, the state and the memory of rank 0."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from lib.optim.muon import HasHiddenMatrices
from lib.plan.tables import FREE_MEMORY_MARGIN
from lib.plan.types import Memory, fixed_plan
from lib.units import bytes_text
from tests.support.tokens import BLOCK, small_lm_config, text_data
from tests.support.training import random_data, small_config, small_job, small_plan
from train.job import Job, Progress, checkpoint_format, saves_beside, state_bytes
from train.loop import optimizer_step

FREE = 10**9


@pytest.fixture(scope="module")
def made() -> Job:
    config = small_config(optimizer="adamw", ema=True, ema_decay=0.5)
    return small_job(config, small_plan(4), random_data(config, shape=(1, 28, 28), train_size=8))


def chosen(
    job: Job, requested: str, free_bytes: int, strategy: str = "fsdp", **plan: Any
) -> tuple[bool, str]:
    shard = 2 if strategy == "fsdp" else 1
    plan = {"micro_batch": 4, "world": 2, "strategy": strategy, "shard": shard, **plan}
    config = job.config.replace(checkpoint_format=requested)
    return checkpoint_format(
        dataclasses.replace(job, config=config, plan=fixed_plan("test", **plan)), free_bytes=free_bytes
    )


def test_sharded_where_the_state_does_not_fit(made: Job) -> None:
    # Weights, two moments and the average, in float64.
    state_bytes = 8 * 4 * sum(weight.numel() for weight in made.model.parameters())
    fits = round(state_bytes / FREE_MEMORY_MARGIN) + 8
    assert chosen(made, "auto", fits)[0] is False and chosen(made, "auto", fits - 16)[0] is True
    assert chosen(made, "auto", fits - 16, "zero1")[0] is True
    assert chosen(made, "auto", 0, "ddp") == (False, "")
    assert chosen(made, "auto", 0)[1].startswith("sharded; ") and "0.00 GB" in chosen(made, "auto", 0)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "changes", "numbers"),
    [
        ("sgd", {"momentum": 0.0, "nesterov": False}, (1, 1)),
        ("sgd", {"momentum": 0.9, "nesterov": False}, (2, 2)),
        ("adam", {}, (3, 3)),
        ("muon", {"momentum": 0.9, "muon_learning_rate": 0.02, "nesterov": True}, (3, 2)),
        ("adam_atan2", {}, (3, 3)),
    ],
)
def test_the_state_is_that_of_the_optimizer(
    optimizer: str, changes: dict[str, Any], numbers: tuple[int, int]
) -> None:
    """numbers: for each number of a weight, and of a hidden matrix, with the weight itself."""
    config = small_lm_config(optimizer=optimizer, **changes)
    noise = np.zeros(6 * BLOCK, np.uint8)
    job = small_job(config, small_plan(4), text_data(config, train=noise, test=noise))
    assert isinstance(job.model, HasHiddenMatrices)
    matrices = sum(weight.numel() for weight in job.model.hidden_matrices())
    others = sum(weight.numel() for weight in job.model.parameters()) - matrices
    need_bytes = 8 * (numbers[0] * others + numbers[1] * matrices)
    assert chosen(job, "full", FREE)[1].startswith(f"full, as requested; {bytes_text(need_bytes)} of state")
    optimizer_step(job, Progress())
    kept = [
        each
        for weight, state in job.optimizer.state.items()
        for each in state.values()
        if isinstance(each, torch.Tensor) and each.shape == weight.shape
    ]
    assert 8 * (others + matrices + sum(each.numel() for each in kept)) == need_bytes, "by the real one"


def test_on_a_cpu_training_needs_the_same_memory(made: Job) -> None:
    memory = Memory(parts={"activations": FREE // 2}, reserve_bytes=0, usable_bytes=FREE)
    assert chosen(made, "auto", FREE // 2, memory=memory)[0] is True
    assert chosen(made, "auto", FREE // 2, memory=memory, device="cuda")[0] is False
    assert chosen(made, "auto", FREE, memory=memory)[0] is False


def test_a_request_is_obeyed_and_a_risk_is_named(made: Job) -> None:
    assert chosen(made, "sharded", FREE) == (True, "sharded, as requested")
    alone = "sharded, as requested: one shard, for every process has all state"
    assert chosen(made, "sharded", FREE, "ddp") == (True, alone)
    is_sharded, text = chosen(made, "full", 0)
    assert not is_sharded and text.startswith("full, as requested; ") and text.endswith(": it does not fit")
    assert not chosen(made, "full", FREE)[1].endswith(": it does not fit")


@pytest.mark.parametrize(
    ("strategy", "is_sharded", "copies"),
    [("ddp", False, 1), ("zero1", False, 2), ("fsdp", False, 2), ("fsdp", True, 1)],
)
def test_large_states_are_written_beside_training_where_copies_fit(
    made: Job, strategy: str, is_sharded: bool, copies: int
) -> None:
    shard = 2 if strategy == "fsdp" else 1
    plan = fixed_plan("test", micro_batch=4, world=2, strategy=strategy, shard=shard)
    at_rate = {rate: made.config.replace(checkpoint_async_mb=rate) for rate in (0, 1, 100)}
    need_bytes = state_bytes(made)
    assert 10**6 < need_bytes < 10**8

    def chosen(rate: int, free_bytes: int) -> tuple[bool, str]:
        job = dataclasses.replace(made, config=at_rate[rate], plan=plan)
        return saves_beside(job, free_bytes=free_bytes, is_sharded=is_sharded)

    fits = round(copies * need_bytes / FREE_MEMORY_MARGIN) + 8
    assert chosen(0, FREE) == chosen(100, FREE) == (False, "")
    assert chosen(1, fits)[0] and chosen(1, fits)[1].startswith("written beside training; ")
    assert not chosen(1, fits - 16)[0] and "no main memory for a copy" in chosen(1, fits - 16)[1]
