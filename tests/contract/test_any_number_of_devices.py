"""Every shipped configuration plans for any number of devices, at the same effective batch."""

from __future__ import annotations

import dataclasses

import pytest

from lib.errors import PlanError
from lib.plan import plan
from lib.plan.gpus import parse_gpu
from tests.contract.plan_facts import SHIPPED, config_of, estimator_of, facts_of, recorded

GPUS = ("h100-80g", "a100-40g", "rtx3090", "rtx2060-6g", "mi300x")
COUNTS = range(1, 9)
# The puzzles of one are a download of gigabytes; trm-sudoku has the same model. The other needs images and
# the weights of a run, and pretrain-resnet has its model.
UNRECORDED = {"trm-sudoku-extreme", "finetune-resnet"}


def test_every_shipped_configuration_is_recorded() -> None:
    assert {*SHIPPED} - UNRECORDED <= {*recorded()}  # which has those of experiments, too


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in UNRECORDED])
def test_it_plans_for_1_to_8_devices(name: str) -> None:
    config, facts = config_of(name), facts_of(name)
    if config.hyper_param == "auto":  # else it is a recipe for one device, with a micro-batch set by hand
        config = config.replace(num_devices=0)
    if config.auto_method == "probe":
        config = config.replace(auto_method="predict")
    predict = estimator_of(name, facts)
    for gpu in GPUS:
        for count in COUNTS:
            machine = parse_gpu(f"{gpu}x{count}" if count > 1 else gpu)
            try:
                decided = plan(config, machine, facts, predict=predict)
            except PlanError as error:
                raise AssertionError(f"{gpu} x {count}: {error}") from error
            assert decided.effective_batch == config.target
            assert sum(decided.shares) == config.target and len(decided.shares) == decided.world
            ranks = [decided.micro_batches_of(rank) for rank in range(decided.world)]
            assert [sum(sizes) for _, sizes in ranks] == [*decided.shares]
            assert {len(rows) for rows, _ in ranks} == {decided.accumulation}
            assert decided.layout.devices == (config.num_devices or count)


def test_more_devices_than_samples_are_refused() -> None:
    config, facts = config_of("lenet5").replace(target_effective_batch=7), facts_of("lenet5")
    machine = parse_gpu("rtx3090x8")
    with pytest.raises(PlanError, match="each of 8 devices needs at least a sample"):
        plan(config, machine, facts, predict=estimator_of("lenet5", facts))
    resnet = config_of("resnet18").replace(target_effective_batch=7 * 32)
    groups = dataclasses.replace(facts_of("resnet18"), train_size=10_000)
    with pytest.raises(PlanError, match="needs at least a group of CONFIG_NORM_BATCH=32 samples"):
        plan(resnet, machine, groups, predict=estimator_of("resnet18", groups))
