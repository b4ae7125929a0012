"""The parallelism strategy that is chosen, and the verdicts on the others."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import PlanError
from lib.plan import plan
from lib.plan.fitting import MemoryEstimator, NoRoomError, Parts, StepSettings
from lib.plan.gpus import gpu_of, parse_gpu
from lib.plan.planner import compare_strategies
from lib.plan.roofline import SHORT_SECONDS, StepWork, estimate_step_time
from lib.plan.sharding import Units, shares
from lib.plan.show import show
from lib.plan.strategies import TIE, _verdict
from lib.plan.strategy_table import format_strategies
from lib.plan.types import ModelFacts, Plan, Weight
from tests.support.configs import load_hardware, make_config, make_facts

MB = 10**6
BLOCKS = 12


def model_of(parameters: float) -> Units:
    """So many elements in twelve equal blocks, and a small embedding."""
    rows = round(parameters / BLOCKS / 1000)
    return ((Weight((1000, 10), True),), *(((Weight((rows, 1000), True)),),) * BLOCKS)


def facts_of(parameters: float, **changes: Any) -> ModelFacts:
    return make_facts(
        "lenet5",
        units=model_of(parameters),
        flop_per_sample=6 * parameters * 100,
        train_size=10**6,
        **changes,
    )


def adam(facts: ModelFacts, *, per_sample: int = 100 * MB) -> MemoryEstimator:
    """Weights, gradients and two numbers of the optimizer in fp32, and activations."""
    assert facts.units is not None
    elements = sum(weight.elements for unit in facts.units for weight in unit)

    def predict(trial: StepSettings) -> Parts:
        assert trial.layout is not None and facts.units is not None
        cut = shares(facts.units, trial.layout)
        whole = {"parameters": 4, "gradients": 4, "optimizer": 8}
        parts = {name: round(number * elements * cut[name]) for name, number in whole.items()}
        return {**parts, "activations": per_sample * trial.micro_batch}

    return predict


def config_of(**changes: Any) -> Any:
    return make_config(
        "lenet5", **{"auto_method": "predict", "target_effective_batch": 64, "optimizer": "adamw"} | changes
    )


def decide(machine: str, parameters: float, *, per_sample: int = 100 * MB, **changes: Any) -> Plan:
    facts = facts_of(parameters)
    return plan(config_of(**changes), parse_gpu(machine), facts, predict=adam(facts, per_sample=per_sample))


def verdicts(machine: str, parameters: float, **changes: Any) -> dict[str, str]:
    facts = facts_of(parameters)
    found = compare_strategies(config_of(**changes), parse_gpu(machine), facts, predict=adam(facts))
    return {candidate.layout.strategy: candidate.verdict for candidate in found}


# 16 bytes for each weight of a copy, of 42 GB free less 1.6 in reserve.
TABLE = {
    ("a100-40g", 0.5e9): "single",
    ("a100-40gx4", 0.5e9): "ddp",
    ("a100-40gx4", 3e9): "zero1",  # 4 + 4 + 8 / 4
    ("a100-40gx4", 4.2e9): "zero2",  # 4 + 4 / 4 + 4 / 4 + 8 / 4
    ("a100-40gx4", 6e9): "fsdp",  # 16 / 4
    ("a100-40gx16", 6e9): "zero2",  # the network of eight devices is as fast as their links
    ("h200x2", 6e9): "ddp",
}


@pytest.mark.parametrize(("machine", "parameters"), TABLE)
def test_the_table_of_choices(machine: str, parameters: float) -> None:
    decided = decide(machine, parameters)
    assert decided.strategy == TABLE[machine, parameters]
    assert decided.effective_batch == 64 and decided.memory is not None and decided.memory.fits
    assert Plan.from_json(decided.to_json()) == decided


def test_between_nodes_with_a_slow_network_only_gradients_are_sent() -> None:
    assert decide("a100-40gx16", 6e9, dist_network_gbit=25.0).strategy == "hsdp"


def test_every_rival_is_told_why_it_lost() -> None:
    found = verdicts("a100-40gx4", 6e9)
    assert list(found) == ["ddp", "zero1", "zero2", "fsdp", "hsdp"] and found["fsdp"] == "chosen"
    assert found["ddp"].startswith("needs 106.98 GB of 41.88 GB usable at a micro-batch of 1")
    assert "possible with 65.11 GB more on each device" in found["ddp"]
    assert "possible with" in found["zero1"] and "devices, or" not in found["zero1"], "weights stay whole"
    assert "possible with 8 devices, or" in found["hsdp"]
    shared_by_four = verdicts("a100-40gx4", 6e9, target_effective_batch=4)
    assert "devices, or" not in shared_by_four["hsdp"] and "more on each device" in shared_by_four["hsdp"]
    reason = decide("a100-40gx4", 6e9).reasons["strategy"]
    assert reason.startswith("the simplest of the fastest, by estimate; ddp needs")


def test_what_fits_loses_by_time_or_by_simplicity() -> None:
    found = verdicts("a100-40gx4", 0.5e9)
    assert found["ddp"] == "chosen"
    assert all(
        "estimated to take" in verdict or "less simple" in verdict for verdict in list(found.values())[1:]
    )


def test_steps_too_short_to_be_told_apart_are_as_fast() -> None:
    # Some hundred microseconds, in which hardly a kernel is launched.
    found = verdicts("rtx4090x2", 1e6, target_effective_batch=2)
    assert found["ddp"] == "chosen" and found["zero1"] == "not faster, and less simple"
    facts = facts_of(1e6)
    chosen, other = compare_strategies(config_of(), parse_gpu("rtx4090x2"), facts, predict=adam(facts))[:2]
    assert chosen.seconds is not None
    faster = dataclasses.replace(other, seconds=(0.999 * chosen.seconds[0], chosen.seconds[1]))
    assert _verdict(faster, chosen, requested="auto") == "at most 2% or 5 ms faster, and less simple"


def test_without_an_estimate_the_simplest_that_fits_is_chosen() -> None:
    facts = dataclasses.replace(facts_of(3e9), flop_per_sample=None)
    decided = plan(config_of(), parse_gpu("a100-40gx4"), facts, predict=adam(facts))
    assert decided.strategy == "zero1" and decided.reasons["strategy"].startswith("the simplest that fits")


def test_where_nothing_fits_the_nearest_changes_are_named() -> None:
    with pytest.raises(PlanError) as error:
        decide("a100-40gx4", 12e9)
    assert "does not fit on NVIDIA A100-SXM4-40GB" in str(error.value)
    assert isinstance(error.value, NoRoomError) and error.value.step.layout is not None
    assert error.value.step.layout.strategy == "fsdp", "of all strategies that which needs least"
    assert "fsdp with 16 devices, or" in str(error.value) and "ddp with" in str(error.value)


def test_what_is_asked_for_is_done_or_refused() -> None:
    assert decide("a100-40gx4", 0.5e9, dist_strategy="fsdp").strategy == "fsdp"
    assert decide("a100-40gx4", 0.5e9, dist_strategy="hsdp").shard == 2
    with pytest.raises(PlanError, match="CONFIG_DIST_STRATEGY_DDP=y is not possible: needs"):
        decide("a100-40gx4", 6e9, dist_strategy="ddp")
    with pytest.raises(PlanError, match="not on 2 devices; it is possible with 4 or 6 devices; or set"):
        decide("a100-40gx2", 0.5e9, dist_strategy="hsdp")
    with pytest.raises(PlanError, match="not on 13 devices; it is possible with 8 or 16 devices; or set"):
        decide("a100-40gx13", 0.5e9, dist_strategy="hsdp")
    alone = decide("a100-40g", 0.5e9, dist_strategy="fsdp")
    assert alone.strategy == "single" and "has no effect" in alone.reasons["strategy"]
    show(alone, compact := io.StringIO(), compact=True)
    assert "it has all weights, gradients and optimizer state" in " ".join(compact.getvalue().split())


OBSTACLES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "Muon works on whole matrices": ({"optimizer": "muon"}, {}, "zero1"),
    "its state is in 8 bits.*CONFIG_ADAM_8BIT=n": ({"adam_8bit": True}, {}, "zero1"),
    "no loss scaling for sharded gradients": ({"precision": "fp16"}, {}, "zero2"),
    "plain batch normalisation needs whole replicas": ({}, {"has_batchnorm": True}, "fsdp"),
    "filters in channels-last order cannot be sharded": (
        {"channels_last": True},
        {"units": ((Weight((8, 4, 3, 3), True),),)},
        "fsdp",
    ),
    "a weight without dimensions cannot be sharded": ({}, {"units": ((Weight((), True),),)}, "fsdp"),
    "compiled models are not sharded": ({"compile": "manual", "compile_model": True}, {}, "zero2"),
    "the shapes of the weights are not known": ({}, {"units": None}, "zero1"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_cannot_be_says_so(obstacle: str) -> None:
    requested, known, strategy = OBSTACLES[obstacle]
    facts = dataclasses.replace(facts_of(0.5e9), **known)
    config = config_of(dist_strategy=strategy, channels_last=False, norm_batch=None)
    config = config.replace(**requested)

    def predict(trial: StepSettings) -> Parts:
        return {"parameters": MB, "activations": MB * trial.micro_batch}

    with pytest.raises(PlanError, match=obstacle):
        plan(config, parse_gpu("a100-40gx4"), facts, predict=predict)


def test_weights_in_parts_run_without_compilation_and_the_plan_says_so() -> None:
    decided = decide("a100-40gx4", 0.5e9, dist_strategy="fsdp")
    assert not decided.compile and decided.reasons["compile"].startswith("not with sharded parameters (fsdp)")
    assert decide("a100-40gx4", 0.5e9, dist_strategy="zero1").compile


@settings(max_examples=40, deadline=None)
@given(
    parameters=st.floats(1e8, 2e10),
    world=st.sampled_from([1, 2, 3, 4, 8, 16, 64]),
    gpu=st.sampled_from(["a100-40g", "h100-80g", "rtx4090"]),
    per_sample=st.integers(1, 2000).map(lambda count: count * MB),
)
def test_what_is_chosen_fits_and_nothing_that_fits_is_faster(
    parameters: float, world: int, gpu: str, per_sample: int
) -> None:
    facts, machine = facts_of(parameters), parse_gpu(f"{gpu}x{world}")
    config, predict = config_of(target_effective_batch=64 * 3), adam(facts, per_sample=per_sample)
    try:
        found = compare_strategies(config, machine, facts, predict=predict)
    except PlanError:
        return
    chosen = next(candidate for candidate in found if candidate.verdict == "chosen")
    assert chosen.split is not None and chosen.memory is not None and chosen.memory.fits
    assert chosen.seconds is not None
    for candidate in found:
        assert candidate.verdict
        if candidate.split is None:
            assert candidate.why_not and candidate.nearest
        else:
            assert candidate.seconds is not None
            assert max(SHORT_SECONDS, candidate.seconds[0] * TIE) >= chosen.seconds[0]


def test_plans_from_before_there_was_a_choice_are_read() -> None:
    decided = decide("a100-40gx4", 0.5e9)
    old = {name: value for name, value in decided.to_json().items() if name not in ("strategy", "shard")}
    assert Plan.from_json(old).layout == decided.layout
    one = decide("a100-40g", 0.5e9).to_json()
    del one["strategy"], one["shard"]
    assert Plan.from_json(one).strategy == "single"


def test_strategies_are_shown_in_lines_and_for_programs() -> None:
    facts = facts_of(6e9)
    found = compare_strategies(config_of(), parse_gpu("a100-40gx4"), facts, predict=adam(facts))
    wide, narrow = (
        list(format_strategies(found, columns=100)),
        list(format_strategies(found, columns=50)),
    )
    assert all(len(line) <= 100 for line in wide) and any("chosen" in line for line in wide)
    assert any(line.startswith("  hsdp/2") for line in narrow)
    assert wide[1] == "time of an optimizer step, assuming 300 GB/s each way of a link"
    assert found[3].to_json()["step_seconds_estimate"][0] > 0 and found[0].to_json()["micro_batch"] is None


def test_what_is_impossible_for_one_reason_has_one_row() -> None:
    facts = facts_of(1e8)
    found = compare_strategies(config_of(), parse_gpu("tpu-v4-8"), facts, predict=adam(facts))
    lines = list(format_strategies(found, columns=120))
    assert sum("TPUs hold replicas only" in line for line in lines) == 1
    assert any(line.startswith("  zero1, zero2, fsdp, hsdp/2 ") for line in lines)
    assert lines[-1] == "(NAME/N: N devices hold one copy together; split(A,B): devices of each frozen model)"
    for machine, last in (("a100-40gx4", "(NAME/N: "), ("a100-40gx3", "  fsdp")):
        found = compare_strategies(config_of(), parse_gpu(machine), facts, predict=adam(facts))
        lines = list(format_strategies(found, columns=200))
        assert lines[-1].startswith(last), lines
        assert sum(len(each.layout.strategy) > 0 for each in found) == sum(line[:2] == "  " for line in lines)


@pytest.mark.parametrize("target", [64, 67])
def test_an_estimate_moves_what_every_micro_batch_keeps(target: int) -> None:
    facts = dataclasses.replace(facts_of(1.2e8), flop_per_sample=1.0)
    elements = 10_000 + 120_000_000
    predict = adam(facts, per_sample=1000 * MB)
    eager = {"compile": "manual", "compile_model": False}  # compiled, the last one is padded
    config = config_of(precision="bf16", target_effective_batch=target, **eager)
    (one,) = compare_strategies(config, parse_gpu("a100-40g"), facts, predict=predict)
    assert one.split is not None and one.seconds is not None and one.split.accumulation > 1
    assert (one.split.last_micro_batch == one.split.micro_batch) == (target == 64)
    work = StepWork(
        flop=target,
        accumulation=one.split.accumulation,
        weight_bytes=4 * elements,
        gradient_bytes=4 * elements,
        optimizer_bytes=8 * elements,
        activation_bytes=target * 1000 * MB,
    )
    expected = estimate_step_time(work, gpu_of("a100-40g"), precision="bf16")
    assert one.seconds == pytest.approx((expected.fastest_seconds, expected.slowest_seconds))


def test_a_processor_has_no_estimate_and_copies_are_the_simplest() -> None:
    facts = make_facts("lenet5")
    decided = plan(
        make_config("lenet5", auto_method="table", num_devices=2), load_hardware("cpu-24g-amx"), facts
    )
    assert (decided.strategy, decided.shard) == ("ddp", 1)
