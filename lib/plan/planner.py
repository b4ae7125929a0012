"""The door of planning: what was asked + what there is -> what is done, and why."""

from __future__ import annotations

from dataclasses import replace

from lib.plan.asked import Asked
from lib.plan.fitting import Predict
from lib.plan.numerics import choose_compile, choose_precision
from lib.plan.placement import place
from lib.plan.probing import Probed
from lib.plan.sizing import Way, choose_sizes
from lib.plan.types import Hardware, ModelFacts, Plan


def plan(
    config: Asked,
    hardware: Hardware,
    facts: ModelFacts,
    *,
    even: bool = False,
    predict: Predict | None = None,
    probed: Probed | None = None,
) -> Plan:
    """Decide how `config` runs on `hardware`; pure, the same arguments give the same plan.

    predict: says what a step needs of a device's memory. Only AUTO_METHOD_TABLE and a batch that is set
        by hand do without.
    probed: what was measured for this very configuration here; None where nothing was.
    even: never plan a smaller last micro-batch, for a caller that cannot run one.

    Raises PlanError where no plan honours the configuration, with what to change.
    """
    placement = place(config, hardware)
    # Before the batch: the table has one column with compilation and one without.
    compiled = choose_compile(config, placement)
    precision = choose_precision(config, placement, hardware)
    way = Way(
        compile=compiled.value,
        precision=precision.value,
        channels_last=config.channels_last,
        even=even,
        predict=predict,
        probed=probed,
    )
    sizes = choose_sizes(config, facts, placement, way)
    reasons = {
        **sizes.reasons,
        "device": placement.device.reason,
        "world": placement.world.reason,
        "precision": precision.reason,
        "channels_last": f"CONFIG_CHANNELS_LAST={'y' if config.channels_last else 'n'}",
        "compile": compiled.reason,
    }
    return Plan(
        device=placement.device.value,
        world=placement.world.value,
        micro_batch=sizes.split.micro_batch,
        accumulation=sizes.split.accumulation,
        last_micro_batch=sizes.split.last_micro_batch,
        effective_batch=sizes.split.samples * placement.world.value,
        target=sizes.target,
        norm_batch=sizes.norm_batch,
        precision=precision.value,
        channels_last=config.channels_last,
        compile=compiled.value,
        memory=sizes.memory,
        reasons=reasons,
    )


def with_smaller_micro_batch(plan: Plan) -> Plan | None:
    """The plan with the next smaller micro-batch that divides a device's share, the effective batch kept.

    None where there is no smaller one (or none that is a multiple of the batch of normalisation).
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
