"""Which changes that need less memory `make plan` shows, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from lib.config import Config
from lib.plan.fitting import predicted, step_settings
from lib.plan.gpus import parse_gpu
from tests.support.outlooks import BATCH, outlook, outlook_config, outlook_data, short_of_memory
from train.planning.changes import changes
from train.planning.command import _lines, is_short_of_memory
from train.planning.memory_estimate import MemoryTraces
from train.training_data import TrainingData

HEADING = "Changes that need less memory:"


@pytest.mark.slow
def test_changes_are_traced_and_shown_where_memory_is_short() -> None:
    found, short_one = (
        outlook("h100-80g", 64, optimizer="adamw"),
        short_of_memory("h100-80g", 64, optimizer="adamw"),
    )
    assert not found.alternatives and HEADING not in [*_lines(found)]
    assert short_one.alternatives and HEADING in [*_lines(short_one)]
    memory = found.plan.memory
    assert memory is not None

    def short(share: float = 0.01, *, method: str = "predicted", **changed: Any) -> bool:
        usable = replace(memory, usable_bytes=round(memory.need_bytes / share))
        decided = replace(found.plan, memory=usable, **changed)
        return is_short_of_memory(replace(found, plan=decided, method=method))

    assert short(0.51) and not short(0.49) and short(0.9, method="manual")
    two: dict[str, Any] = {"accumulation": 2, "micro_batch": 32, "last_micro_batch": 32}
    assert short(**two) and not short(method="manual", **two)
    assert not short(device="cpu", **two), "larger micro-batches are no faster on CPUs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "count"), [({"optimizer": "adamw"}, 2), ({"optimizer": "sgd", "ema": True, "ema_decay": 0.9}, 1)]
)
@pytest.mark.parametrize("batch", [2, BATCH])
def test_what_a_change_leaves_as_it_is_bounds_its_peak(own: dict[str, Any], count: int, batch: int) -> None:
    """With 2 samples the peak is the update's, with all of them the backward pass's."""
    found, machine = outlook("h100-80g", batch, **own), parse_gpu("h100-80g")
    config = outlook_config(batch, **own)
    data, step = outlook_data(config), step_settings(found.plan)
    bounded = [each for each in changes(config, machine, precision=step.precision) if each.only]
    for change in bounded:
        least = MemoryTraces(config, data).least_peak(step, machine, without=change.only)
        predict = MemoryTraces(change.subject, data).predictor(machine, gaps=False)
        peak = predicted(step, predict, free_bytes=0).peak_bytes
        assert 0 < least <= peak, change.name
    assert len(bounded) == count


@pytest.mark.slow
def test_a_change_that_cannot_help_enough_is_not_traced() -> None:
    """It is shown where the least share that is worth a line allows it, and left out by the bound else."""

    def names(share: float) -> set[str]:
        with mock.patch("train.planning.changes.LEAST_SHARE", share):
            lines = short_of_memory("h100-80g", BATCH, optimizer="adamw").alternatives
        return {line.partition("=")[0] for line in lines}

    by_optimizer = {"CONFIG_OPTIMIZER_SGD", "CONFIG_ADAM_8BIT"}
    assert by_optimizer <= names(2.0)
    traced = list[Config]()
    init = MemoryTraces.__init__

    def spied(self: MemoryTraces, config: Config, data: TrainingData) -> None:
        traced.append(config)
        init(self, config, data)

    with mock.patch.object(MemoryTraces, "__init__", spied):
        assert not by_optimizer & names(0.0)
    assert not any(config.optimizer == "sgd" or config.adam_8bit for config in traced)
