"""Entry point of planning: configuration + hardware + model facts -> plan with reasons."""

from __future__ import annotations

from dataclasses import replace

from lib.plan.asked import Asked, Decision
from lib.plan.fitting import MemoryEstimator
from lib.plan.latentwire import as_ruled, one_model
from lib.plan.numerics import choose_channels_last, choose_compile, choose_precision
from lib.plan.placement import Placement, place
from lib.plan.probing import Probed
from lib.plan.sharding import layouts
from lib.plan.sizing import Way
from lib.plan.strategies import Candidate, Choice, choose_strategy, why_shard
from lib.plan.types import Hardware, ModelFacts, Plan


def plan(
    config: Asked,
    hardware: Hardware,
    facts: ModelFacts,
    *,
    even: bool = False,
    predict: MemoryEstimator | None = None,
    probed: Probed | None = None,
) -> Plan:
    """Return the plan for `config` on `hardware`; pure, equal arguments give equal plans.

    predict: predicts the memory of a step. Only AUTO_METHOD_TABLE and a batch set by hand work without it.
    probed: measurements of this configuration on this hardware; None where there are none.
    even: never plan a smaller last micro-batch, for a caller that cannot run one.

    Raises PlanError, with a remedy, where no plan honours the configuration.
    """
    placement, choice = _choice(config, hardware, facts, even=even, predict=predict, probed=probed)
    sizes, taken = choice.sizes, choice.taken
    compiled = _compiled(config, placement, taken)
    precision = choose_precision(config, placement, hardware)
    channels_last = choose_channels_last(config, placement)
    reasons = {
        **sizes.reasons,
        "device": placement.device.reason,
        "world": _why_processes(placement, taken),
        "strategy": choice.reason,
        "shard": why_shard(taken.layout),
        "precision": precision.reason,
        "channels_last": channels_last.reason,
        "compile": compiled.reason,
    }
    return Plan(
        device=placement.device.value,
        world=taken.layout.world,
        strategy=taken.layout.strategy,
        shard=taken.layout.shard,
        micro_batch=sizes.split.micro_batch,
        accumulation=sizes.split.accumulation,
        last_micro_batch=sizes.split.last_micro_batch,
        effective_batch=sizes.split.samples * taken.layout.world,
        target=sizes.target,
        norm_batch=sizes.norm_batch,
        precision=precision.value,
        channels_last=channels_last.value,
        compile=compiled.value,
        memory=sizes.memory,
        reasons=reasons,
    )


def ways_to_spread(
    config: Asked,
    hardware: Hardware,
    facts: ModelFacts,
    *,
    predict: MemoryEstimator | None,
    probed: Probed | None = None,
) -> tuple[tuple[Candidate, str], ...]:
    """Return every parallelism strategy that `plan` considers, with its verdict."""
    return _choice(config, hardware, facts, even=False, predict=predict, probed=probed)[1].verdicts


def _choice(
    config: Asked,
    hardware: Hardware,
    facts: ModelFacts,
    *,
    even: bool,
    predict: MemoryEstimator | None,
    probed: Probed | None,
) -> tuple[Placement, Choice]:
    placement = place(config, hardware)
    ruled = None
    if config.hyper_param == "auto" and config.elastic_policy == "latentwire":
        ruled = one_model(config, facts, placement)
        config = as_ruled(config, ruled)
    way = Way(
        # Chosen before the batch: the table has one column with compilation and one without.
        compile=choose_compile(config, placement).value,
        precision=choose_precision(config, placement, hardware).value,
        channels_last=choose_channels_last(config, placement).value,
        even=even,
        predict=predict,
        probed=probed,
        layout=next(layouts(placement.world.value)),
    )
    choice = choose_strategy(config, facts, placement, way)
    if ruled is not None:
        reasons = {**choice.sizes.reasons, "micro_batch": ruled.why_micro_batch, "target": ruled.why_target}
        choice = replace(choice, sizes=replace(choice.sizes, reasons=reasons), reason=ruled.why_strategy)
    return placement, choice


def _why_processes(placement: Placement, taken: Candidate) -> str:
    pairs = "" if taken.layout.devices_per_process == 1 else "; each process has two of them"
    return placement.world.reason + pairs


def _compiled(config: Asked, placement: Placement, taken: Candidate) -> Decision[bool]:
    compiled = choose_compile(config, placement)
    if compiled.value and not taken.way.compile:
        return Decision(
            False, f"not with weights in parts ({taken.layout.strategy}); else: {compiled.reason}"
        )
    return compiled


def with_smaller_micro_batch(plan: Plan) -> Plan | None:
    """Return the plan with the next smaller divisor as micro-batch, at the same effective batch.

    None where there is no smaller one (or none that is a multiple of NORM_BATCH).
    """
    per_device, step = plan.effective_batch // plan.world, plan.norm_batch or 1
    smaller = [size for size in range(step, plan.micro_batch, step) if per_device % size == 0]
    if not smaller:
        return None
    size, count = smaller[-1], per_device // smaller[-1]
    reasons = {
        **plan.reasons,
        "micro_batch": f"memory ran out at {plan.micro_batch}; {size} is the next divisor of {per_device}",
        "accumulation": f"{count} x {size} = {per_device} samples per device and optimizer step",
        "last_micro_batch": "all are of one size",
        "memory": "less than at the micro-batch at which it ran out",
    }
    return replace(
        plan, micro_batch=size, accumulation=count, last_micro_batch=size, memory=None, reasons=reasons
    )
