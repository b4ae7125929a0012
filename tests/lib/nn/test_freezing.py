"""What is frozen does not move, and takes no gradient and no state, in training and as predicted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from lib.errors import ConfigError
from lib.nn.batch_norm import FrozenNorm
from lib.nn.weights import freeze
from lib.plan.fitting import StepSettings
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import (
    CPU,
    CPU_TRIAL,
    clone,
    largest_difference,
    random_data,
    small_config,
    small_job,
    small_plan,
    trained,
)
from train import loop
from train.job import Progress
from train.planning.memory_estimate import plan_of, trace_memory

HALF = "stem stages.0 stages.1"


def resnet(**changes: Any) -> Any:
    config = small_config("resnet18", freeze=HALF, augment="none", **changes)
    return config, random_data(config, shape=(3, 16, 16), train_size=16)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 2, 1)
    )


@pytest.mark.parametrize(
    ("patterns", "frozen", "norms"),
    [
        ("0", {"0.weight", "0.bias"}, ""),
        ("0.weight", {"0.weight"}, ""),
        ("*.bias", {"0.bias", "1.bias", "3.bias"}, ""),
        ("1", {"1.weight", "1.bias"}, "1"),
        ("1.weight 1.bias", {"1.weight", "1.bias"}, "1"),
        ("2 0.bias", {"0.bias"}, "2"),
        ("[01]", {"0.weight", "0.bias", "1.weight", "1.bias"}, "1"),
    ],
)
def test_patterns_name_weights_or_what_is_above_them(patterns: str, frozen: set[str], norms: str) -> None:
    freeze(model := net(), patterns)
    model.train()
    assert {name for name, weight in model.named_parameters() if not weight.requires_grad} == frozen
    assert {name for name, each in model.named_modules() if isinstance(each, FrozenNorm)} == {*norms}
    assert all(each.training != isinstance(each, FrozenNorm) for each in model.modules())


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("stem 4", "no weight matches stem: close to it: 0, .*; correct or remove it"),
        ("0 0.weigth", r"no weight matches 0\.weigth: close to it: 0\.weight"),
        ("*", "leaves nothing to train: .* matches all 6 weights"),
        ("0 1 3", "leaves nothing to train"),
    ],
)
def test_a_pattern_without_weights_and_one_with_all_are_refused(patterns: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^CONFIG_FREEZE:? {message}"):
        freeze(net(), patterns)


@pytest.mark.slow
@pytest.mark.parametrize("norm_batch", [0, 4])
@pytest.mark.parametrize("ema", [False, True])
def test_frozen_weights_and_statistics_stay_and_the_others_move(norm_batch: int, ema: bool) -> None:
    config, data = resnet(grad_clip=1.0, ema=ema, ema_decay=0.5 if ema else None)
    job = small_job(config, small_plan(4, 4, norm_batch=norm_batch), data)
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    after = trained(job)
    for name, value in after.items():
        is_frozen = name.startswith(("stem", "stages.0.", "stages.1."))
        assert torch.equal(before[name], value) == is_frozen, name
    frozen = {id(weight) for weight in job.model.parameters() if not weight.requires_grad}
    held = {id(weight) for group in job.optimizer.param_groups for weight in group["params"]}
    assert frozen and not frozen & held
    assert job.ema is None or not any(name.startswith("stem") for name in job.ema.state_dict())


@pytest.mark.slow
def test_a_frozen_part_is_the_same_however_a_batch_is_split() -> None:
    config, data = resnet()
    whole, split = (
        trained(small_job(config, small_plan(*sizes, norm_batch=4), data)) for sizes in ((8,), (4, 4))
    )
    assert largest_difference(whole, split) < 1e-12


@pytest.mark.slow
def test_a_network_whose_norms_are_all_frozen_needs_no_groups() -> None:
    config = small_config("resnet18", freeze="stem stages")
    assert not random_data(config, shape=(3, 16, 16), train_size=16).facts.has_batchnorm
    assert resnet()[1].facts.has_batchnorm


@pytest.mark.slow
def test_a_checkpoint_with_frozen_weights_resumes_bit_for_bit() -> None:
    config, data = resnet(optimizer="adamw", ema=True, ema_decay=0.5)
    plan = small_plan(4, norm_batch=4)
    job, progress = small_job(config, plan, data), Progress()
    loop.optimizer_step(job, progress)
    progress.step = 1
    state = clone(loop.state_dict(job, progress))
    other = small_job(config, plan, data)
    resumed = loop.load_state_dict(other, state)
    for each, at in ((job, progress), (other, resumed)):
        loop.optimizer_step(each, at)
    assert largest_difference(job.model.state_dict(), other.model.state_dict()) == 0


def storages(config: Any, data: Any, trial: StepSettings) -> Counter[str]:
    """Bytes of all storages of two steps, by kind."""
    trace, found = trace_memory(config, plan_of(trial), data, hardware=CPU).trace, Counter[str]()
    for number, byte_count in trace.events:
        found[trace.categories.get(number, "")] += max(0, byte_count)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["alone", "ddp"])
@pytest.mark.parametrize("model", ["resnet18", "gpt2"])
def test_the_prediction_falls_by_the_bytes_of_what_is_frozen(model: str, several: bool) -> None:
    patterns = {"resnet18": HALF, "gpt2": "backbone.token backbone.position backbone.blocks.0"}[model]
    adam = {
        "optimizer": "adamw",
        "ema": True,
        "ema_decay": 0.9,
        "augment": "none",
        "data_placement": "stream",
    }
    if model == "resnet18":
        config = small_config(model, **adam)
        data = random_data(config, shape=(3, 16, 16), train_size=64)
    else:
        data = text_data(config := small_lm_config(**adam))
    trial = dataclasses.replace(CPU_TRIAL, several_devices=several, accumulates=False)
    frozen = config.replace(freeze=patterns)
    job = small_job(frozen, small_plan(8), data, dtype=torch.float32)
    sizes = [4 * each.numel() for each in job.model.parameters() if not each.requires_grad]
    saved, counters = sum(sizes), 4 * len(sizes)
    before, after = (storages(each, data, trial) for each in (config, frozen))
    assert saved > 0 and before["parameters"] == after["parameters"]
    assert before["averages"] - after["averages"] == saved
    assert before["optimizer"] - after["optimizer"] == 2 * saved + counters
    assert before["gradients"] - after["gradients"] == saved * (1 if several else 2), "of two steps"
