"""Stages of a pipeline: their sizes, memory and time, and when the plan chooses them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lib.errors import PlanError
from lib.plan import plan
from lib.plan.fitting import MemoryEstimator, Parts, StepSettings
from lib.plan.gpus import gpu_of, parse_gpu
from lib.plan.planner import compare_strategies
from lib.plan.roofline import StepWork
from lib.plan.sharding import Links
from lib.plan.show import compact_text
from lib.plan.sizing import Candidate
from lib.plan.stages import (
    buffer_bytes,
    idle_share,
    most_samples,
    pipeline_seconds,
    slowest_stage,
    stage_blocks,
    stage_shares,
    stages_of,
)
from lib.plan.strategy_table import format_strategies
from lib.plan.types import Layout, ModelFacts, Plan, StageFacts
from tests.lib.plan.test_strategies import BLOCKS, MB, adam, config_of, facts_of

SENT = 4 * 1024 * 1000  # bytes of a sample between two stages


def staged(parameters: float) -> ModelFacts:
    facts = facts_of(parameters)
    assert facts.units is not None
    ends = StageFacts(first=facts.units[0], last=facts.units[0], tied=10_000, bytes_per_sample=SENT)
    return dataclasses.replace(facts, stages=ends)


def layout(world: int, *, shard: int | None = None) -> Layout:
    return Layout(strategy="pipeline", world=world, shard=shard or world)


def predictor(facts: ModelFacts) -> MemoryEstimator:
    """As `adam`, with the shares of stages and what they keep for exchanges."""
    assert facts.units is not None and facts.stages is not None
    elements, other = sum(weight.elements for unit in facts.units for weight in unit), adam(facts)

    def predict(trial: StepSettings) -> Parts:
        if trial.layout is None or trial.layout.strategy != "pipeline":
            return other(trial)
        assert facts.stages is not None
        cut, whole = stage_shares(facts, trial.layout), {"parameters": 4, "gradients": 4, "optimizer": 8}
        parts = {name: round(number * elements * cut[name]) for name, number in whole.items()}
        kept = buffer_bytes(facts.stages, trial.layout, samples=64, micro_batch=trial.micro_batch)
        activations = round(100 * MB * trial.micro_batch * cut["activations"])
        return {**parts, "activations": activations, "stage buffers": kept}

    return predict


def decide(machine: str, parameters: float, **changes: Any) -> Plan:
    facts = staged(parameters)
    return plan(config_of(**changes), parse_gpu(machine), facts, predict=predictor(facts))


def verdicts(machine: str, facts: ModelFacts, **changes: Any) -> dict[str, str]:
    found = compare_strategies(config_of(**changes), parse_gpu(machine), facts, predict=predictor(facts))
    return {candidate.layout.strategy: candidate.verdict for candidate in found}


@pytest.mark.parametrize(
    ("blocks", "last", "stages", "expected"),
    [
        (12, 0, 4, (3, 3, 3, 3)),
        (12, 50, 2, (9, 3)),  # what comes after the blocks is as much as five of them
        (4, 0, 3, (2, 1, 1)),
        (3, 90, 3, (2, 1, 0)),
        (3, 0, 4, ()),
    ],
)
def test_the_slowest_stage_is_as_fast_as_it_can_be(
    blocks: int, last: int, stages: int, expected: tuple[int, ...]
) -> None:
    assert stage_blocks(blocks, block=10, last=last, stages=stages) == expected


def test_stages_have_all_weights_and_all_work() -> None:
    facts = staged(1.2e9)
    assert facts.units is not None and facts.stages is not None
    stages = stages_of(facts, layout(5))
    assert sum(stage.blocks for stage in stages) == BLOCKS
    inside = sum(weight.elements for unit in facts.units[1:] for weight in unit)
    assert sum(stage.parameters for stage in stages) == inside + 2 * 10_000
    assert sum(stage.work for stage in stages) == pytest.approx(1)
    shares = stage_shares(facts, layout(4))
    assert shares["parameters"] == pytest.approx(1 / 4, rel=1e-3) == shares["optimizer"]
    assert shares["activations"] == 1, "four micro-batches in the first of four stages"
    assert stage_shares(facts, layout(5))["activations"] == 5 * 3 / 12
    work = StepWork(
        flop=100, accumulation=2, weight_bytes=100, gradient_bytes=100, optimizer_bytes=9, activation_bytes=40
    )
    slowest = slowest_stage(work, facts, layout(4))
    assert slowest.flop == pytest.approx(25, rel=1e-3) and slowest.weight_bytes == 25
    assert (slowest.activation_bytes, slowest.optimizer_bytes) == (10, 9)


def test_stages_wait_while_the_pipeline_fills_and_for_what_is_sent() -> None:
    assert idle_share(layout(4), accumulation=1) == 3 / 4
    assert idle_share(layout(4), accumulation=9) == 3 / 12
    facts, gpu = staged(1e9), gpu_of("a100-40g")
    assert facts.stages is not None and gpu is not None
    sizes, links = {"samples": 64, "accumulation": 9}, Links.of(gpu, config_of(), per_node=0)
    alone = dataclasses.replace(facts, stages=dataclasses.replace(facts.stages, tied=0, bytes_per_sample=0))
    assert pipeline_seconds(3.0, alone, layout(4), links, **sizes) == pytest.approx(4.0)
    sent = 2 * 64 * SENT / gpu.link_bytes_per_second
    tied = 4 * 10_000 / gpu.link_bytes_per_second
    once = (3 + sent) * 12 / 9 + tied
    assert pipeline_seconds(3.0, facts, layout(4), links, **sizes) == pytest.approx(once)
    # Of two pipelines equal stages sum their gradients, after all micro-batches.
    most = max(stage.trained for stage in stages_of(facts, layout(8, shard=4)))
    summed = 4 * most / gpu.link_bytes_per_second
    found = pipeline_seconds(3.0, facts, layout(8, shard=4), links, **sizes)
    assert found == pytest.approx(once + summed)
    # Two nodes of four: stages are within one, and equal ones across both. Of three: a pipeline is on two.
    slow = gpu.link_bytes_per_second / links.network_bytes_per_second
    of_four, of_three = (dataclasses.replace(links, per_node=each) for each in (4, 3))
    found = pipeline_seconds(3.0, facts, layout(8, shard=4), of_four, **sizes)
    assert found == pytest.approx(once + summed * slow)
    found = pipeline_seconds(3.0, facts, layout(8, shard=4), of_three, **sizes)
    assert found == pytest.approx((3 + sent * slow) * 12 / 9 + (tied + summed) * slow)


def test_it_is_chosen_where_links_are_slow_and_replicas_do_not_fit() -> None:
    """On GPUs of 24 GB beside PCIe the weights of FSDP take longer than the activations of a pipeline."""
    decided = decide("rtx3090x4", 4e9)
    assert decided.strategy == "pipeline" and decided.shard == decided.world == 4
    assert decided.shares == (64,) and decided.accumulation >= 4 * 4
    assert decided.memory is not None and decided.memory.fits and "stage buffers" in decided.memory.parts
    assert "fsdp estimated to take" in decided.reasons["strategy"]
    assert decided.reasons["shard"].startswith("stages of 3 + 3 + 3 + 3 blocks; each waits ")
    assert "all on one pipeline, as requested" in decided.reasons["effective_batch"]
    assert "pipeline in 4 stages" in compact_text(decided, columns=100)
    assert Plan.from_json(decided.to_json()) == decided


@pytest.mark.parametrize(("gbit", "strategy"), [(400.0, "ddp"), (25.0, "pipeline")])
def test_it_is_chosen_where_the_network_between_nodes_is_slow(gbit: float, strategy: str) -> None:
    """Two nodes of four: gradients of 8 GB against activations of 64 samples of 4 MB."""
    machine = dataclasses.replace(parse_gpu("a100-40gx8"), per_node=4)
    facts, config = staged(2e9), config_of(dist_network_gbit=gbit)
    assert plan(config, machine, facts, predict=predictor(facts)).strategy == strategy
    compared = compare_strategies(config, machine, facts, predict=predictor(facts))
    _, rates, *_ = format_strategies(compared, columns=100)
    assert rates.endswith(
        f"300 GB/s each way of a link and {gbit:g} Gbit/s of network for each device, 4 devices on a node "
        "(CONFIG_DIST_NETWORK_GBIT)"
    )
    one_node = dataclasses.replace(machine, per_node=8)
    assert plan(config, one_node, facts, predict=predictor(facts)).strategy == "ddp", "it has no network"


def test_it_is_not_chosen_where_replicas_are_as_fast() -> None:
    found = verdicts("a100-40gx4", staged(0.5e9))
    assert found["ddp"] == "chosen" and found["pipeline"].startswith("estimated to take")
    assert "pipeline" not in verdicts_without_stages()


def verdicts_without_stages() -> dict[str, str]:
    facts = facts_of(0.5e9)
    found = compare_strategies(config_of(), parse_gpu("a100-40gx4"), facts, predict=adam(facts))
    return {candidate.layout.strategy: candidate.verdict for candidate in found}


@pytest.mark.parametrize(
    ("machine", "changes", "why"),
    [
        ("a100-40gx13", {}, "it would be 13 stages of 12 blocks"),
        ("a100-40gx4", {"precision": "fp16"}, "no loss scaling"),
        ("a100-40gx4", {"activation_offload": True}, "activations are offloaded"),
        ("a100-40gx4", {"compile": "manual", "compile_model": True}, "compiled models are not sharded"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(machine: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match="CONFIG_DIST_STRATEGY_PIPELINE=y is not possible") as error:
        decide(machine, 0.5e9, dist_strategy="pipeline", **changes)
    assert why in error.value.why and error.value.todo


@pytest.mark.parametrize(("nodes", "remedy"), [(1, "CONFIG_NUM_DEVICES=12"), (13, "CONFIG_DIST_NNODES=12")])
def test_where_no_divisor_of_the_devices_is_small_enough_fewer_would_do(nodes: int, remedy: str) -> None:
    facts, machine = staged(0.5e9), dataclasses.replace(parse_gpu("a100-40gx13"), per_node=13 // nodes)
    with pytest.raises(PlanError) as error:
        plan(config_of(dist_strategy="pipeline"), machine, facts, predict=predictor(facts))
    assert remedy in error.value.todo.split()[4].rstrip(";"), error.value.todo


def test_several_pipelines_are_planned_and_share_the_batch() -> None:
    """Stages by hand, or the fastest divisor of the devices; more than blocks are not considered."""
    by_hand = decide("a100-40gx8", 0.5e9, dist_strategy="pipeline", dist_stages=2)
    assert (by_hand.world, by_hand.shard, by_hand.shares) == (8, 2, (16,) * 4)
    assert "16 on each of 4 pipelines" in by_hand.reasons["effective_batch"]
    assert by_hand.reasons["shard"].endswith("; 4 pipelines, whose equal stages sum their gradients")
    assert "pipeline in 2 stages x 4" in compact_text(by_hand, columns=100)
    assert Plan.from_json(by_hand.to_json()) == by_hand
    whole = decide("a100-40gx8", 0.5e9, dist_strategy="pipeline", dist_stages=8)
    assert by_hand.memory is not None and whole.memory is not None
    assert by_hand.memory.parts["optimizer"] == pytest.approx(4 * whole.memory.parts["optimizer"], rel=0.4)
    unequal = decide("a100-40gx6", 0.5e9, dist_strategy="pipeline", dist_stages=2)
    assert unequal.shares == (22, 21, 21) and unequal.is_padded
    # 16 devices are more than 12 blocks. More pipelines wait less, and sum more.
    chosen = decide("a100-40gx16", 0.5e9, dist_strategy="pipeline")
    assert chosen.shard == 4 and chosen.layout.replicas == 4
    table = format_strategies(found_on("a100-40gx16", dist_strategy="pipeline"), columns=100)
    names = [line.split()[0] for line in table if line.split()[0].startswith("pipeline")]
    assert names == ["pipeline/8", "pipeline/4", "pipeline/2"]


def test_what_each_strategy_would_need_is_a_sentence() -> None:
    found = found_on("a100-40gx6", target_effective_batch=4)
    verdicts = [each.verdict for each in found]
    assert "chosen" in verdicts
    assert verdicts[0] == (
        "each of 6 devices needs at least a sample; set the nearest that can, CONFIG_TARGET_EFFECTIVE_BATCH=6"
    )


def test_a_pipeline_keeps_buffers_for_its_own_share() -> None:
    config = config_of(target_effective_batch=65)
    assert most_samples(config, layout(4)) == 65
    assert most_samples(config, layout(4, shard=2)) == 33
    # By hand the batch is that of one pipeline.
    by_hand = {"hyper_param": "manual", "batch_size": 4, "gradient_accumulation": 3}
    config = config_of(target_effective_batch=0, **by_hand)
    assert most_samples(config, layout(4, shard=2)) == 12


def found_on(machine: str, **changes: Any) -> tuple[Candidate, ...]:
    facts = staged(0.5e9)
    return compare_strategies(config_of(**changes), parse_gpu(machine), facts, predict=predictor(facts))


@pytest.mark.parametrize("stages", [3, 16, 1])
def test_stages_that_the_devices_cannot_have_are_refused(stages: int) -> None:
    with pytest.raises(PlanError, match=f"CONFIG_DIST_STAGES={stages} is not possible") as error:
        decide("a100-40gx8", 0.5e9, dist_strategy="pipeline", dist_stages=stages)
    assert "8 or 4 or 2" in error.value.todo


def test_stages_by_hand_of_too_few_blocks_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        decide("a100-40gx16", 0.5e9, dist_strategy="pipeline", dist_stages=16)
    assert "16 stages of 12 blocks" in error.value.why and "CONFIG_DIST_STAGES=0" in error.value.todo


def test_a_model_without_a_chain_of_blocks_is_refused() -> None:
    facts = facts_of(0.5e9)
    with pytest.raises(PlanError) as error:
        plan(config_of(dist_strategy="pipeline"), parse_gpu("a100-40gx4"), facts, predict=adam(facts))
    assert error.value.why == "lenet5 is no chain of blocks that stages could divide"
    allowed = decide("a100-40gx4", 0.5e9, dist_strategy="pipeline", optimizer="muon")
    assert allowed.strategy == "pipeline"
