"""Entry point of planning: configuration + hardware + model facts -> plan with reasons."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from lib.plan.fitting import MemoryEstimator, Split, StepSettings, split_evenly
from lib.plan.numerics import choose_channels_last, choose_compile, choose_precision
from lib.plan.placement import place
from lib.plan.sizing import Candidate, SizingContext, choose_sizes
from lib.plan.types import OWN_MEMORY, CompilePart, ConfigView, Decision, Hardware, Layout, ModelFacts, Plan

if TYPE_CHECKING:
    from lib.plan.probe_search import Probed


# What one device has to itself, whatever the strategy that divides it among several.
_KEEPS = {
    "ddp": "the whole batch",
    "zero1": "all optimizer state",
    "pipeline": "all blocks",
    "split": "all models",
    "sequential": "all models",
}


def plan(
    config: ConfigView,
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
    even: never plan a smaller last micro-batch or unequal shares, for a caller that cannot run them.

    Raises PlanError, with a remedy, where no plan meets the configuration.
    """
    context = _context(config, hardware, facts, even=even, predict=predict, probed=probed)
    chosen, _ = _choose(context)
    split, layout = chosen.split, chosen.layout
    assert split is not None
    placement, step = context.placement, chosen.context.step
    compiled = choose_compile(config, placement).reason
    if context.step.compile and not step.compile:
        parts = "a model in stages" if layout.strategy == "pipeline" else "sharded parameters"
        compiled = f"not with {parts} ({layout.strategy}); else: {compiled}"
    compile_parts, cuda_graphs = _compilation(context, step, layout, split)
    each = layout.devices_per_process
    groups = "" if each == 1 else f"; each process has {each} of them"
    reasons = {
        **chosen.reasons,
        "branch_devices": _why_branches(layout),
        "device": placement.device.reason,
        "world": placement.world.reason + groups,
        "precision": choose_precision(config, placement, hardware).reason,
        "channels_last": choose_channels_last(config, placement).reason,
        "compile": compiled,
        "compile_parts": compile_parts.reason,
        "cuda_graphs": cuda_graphs.reason,
    }
    return Plan(
        device=step.device,
        world=layout.world,
        strategy=layout.strategy,
        shard=layout.shard,
        branch_devices=layout.branch_devices,
        micro_batch=split.micro_batch,
        accumulation=split.accumulation,
        last_micro_batch=split.last_micro_batch,
        effective_batch=chosen.effective,
        target=chosen.target,
        norm_batch=step.norm_batch,
        precision=step.precision,
        channels_last=step.channels_last,
        compile=step.compile,
        compile_parts=compile_parts.value,
        cuda_graphs=cuda_graphs.value,
        memory=chosen.memory,
        reasons=reasons,
    )


def _compilation(
    context: SizingContext, step: StepSettings, layout: Layout, split: Split
) -> tuple[Decision[tuple[CompilePart, ...]], Decision[bool]]:
    """Choose the parts of a step that are compiled, and whether they run as CUDA graphs."""
    config, facts = context.config, context.facts
    nothing = "nothing is compiled"
    parts: Decision[tuple[CompilePart, ...]] = Decision((), nothing)
    if not (step.compile or config.compilation.cuda_graphs or config.compilation.compile_blocks):
        return parts, Decision(False, "CONFIG_CUDA_GRAPHS=n")
    from lib.plan.compile_parts import BLOCKS_IGNORED, choose_graphs, choose_parts

    if step.compile:
        parts = choose_parts(config, facts)
    elif config.compilation.compile_blocks:
        parts = Decision((), f"{BLOCKS_IGNORED}: {nothing}")
    devices = {"world": layout.world, "accumulation": split.accumulation}
    return parts, choose_graphs(config, facts, parts.value, device=step.device, **devices)


def compare_strategies(
    config: ConfigView,
    hardware: Hardware,
    facts: ModelFacts,
    *,
    predict: MemoryEstimator | None,
    probed: Probed | None = None,
) -> tuple[Candidate, ...]:
    """Return every parallelism strategy that `plan` considers, with its verdict."""
    return _choose(_context(config, hardware, facts, predict=predict, probed=probed))[1]


def _context(config: ConfigView, hardware: Hardware, facts: ModelFacts, **options: Any) -> SizingContext:
    placement = place(config, hardware)
    world = placement.world.value
    step = StepSettings(
        device=placement.device.value,
        several_devices=world > 1,
        norm_batch=(config.norm_batch or 0) if facts.has_batchnorm else 0,
        precision=choose_precision(config, placement, hardware).value,
        channels_last=choose_channels_last(config, placement).value,
        # Chosen before the batch: the table has one column with compilation and one without.
        compile=choose_compile(config, placement).value,
        layout=Layout(strategy="single" if world == 1 else "ddp", world=world, shard=1),
    )
    return SizingContext(config=config, facts=facts, placement=placement, step=step, **options)


def _choose(context: SizingContext) -> tuple[Candidate, tuple[Candidate, ...]]:
    """Choose a strategy, by LatentWire's policy where the configuration says so."""
    if context.config.hyper_param == "auto" and context.config.elastic_policy == "latentwire":
        from lib.plan.latentwire import apply_policy
        from lib.plan.strategies import only_strategy

        config, layout, reasons = apply_policy(
            context.config, context.facts, context.placement, precision=context.step.precision
        )
        chosen = only_strategy(replace(context, config=config, step=replace(context.step, layout=layout)))
        return (chosen := replace(chosen, reasons={**chosen.reasons, **reasons})), (chosen,)
    placed = context.facts.branches is not None and context.placement.device.value in OWN_MEMORY
    if context.placement.world.value == 1 and not (
        placed and context.config.dist_strategy in ("auto", "sequential")
    ):
        chosen, candidates = _on_one_device(context)
    else:  # their comparison needs a module for each of rates, traffic and sharding
        from lib.plan.strategies import choose_strategy

        chosen, candidates = choose_strategy(context)
    return chosen, candidates


def _why_branches(layout: Layout) -> str:
    if not layout.branch_devices:
        return "no frozen model has devices of its own"
    first, _ = layout.branch_devices
    a, b = (", ".join(map(str, own)) for own in (range(first), range(first, layout.devices_per_process)))
    return f"of a process: the first frozen model on {a}, the second on {b}, the trained model on 0"


def _on_one_device(context: SizingContext) -> tuple[Candidate, tuple[Candidate, ...]]:
    reason, requested = "one device", context.config.dist_strategy
    if requested not in ("auto", "single"):
        keeps = _KEEPS.get(requested, "all weights, gradients and optimizer state")
        reason += f"; NOTE: CONFIG_DIST_STRATEGY_{requested.upper()}=y has no effect on one device: the "
        reason += f"mathematics is the same, no memory is saved, and it has {keeps}"
    chosen = choose_sizes(context)
    if context.step.device != "cpu":  # the catalogue has rates of GPUs only
        from lib.plan.strategies import seconds_of

        chosen = replace(chosen, seconds=seconds_of(chosen))
    own = {"strategy": reason, "shard": "each process has all weights"}
    chosen = replace(chosen, reasons={**chosen.reasons, **own}, verdict="chosen")
    return chosen, (chosen,)


def with_smaller_micro_batch(plan: Plan) -> Plan | None:
    """Return the plan with a smaller micro-batch, at the same effective batch.

    The next smaller divisor of the share if it is at least a quarter, else about a half. None where there is
    no smaller one (or none that is a multiple of NORM_BATCH).
    """
    per_device, step, used = plan.shares[0], plan.norm_batch or 1, plan.micro_batch
    divisors = [size for size in range(step, used, step) if per_device % size == 0]
    if not divisors:
        return None
    split = Split.of(per_device, micro_batch=divisors[-1])
    if 4 * split.micro_batch < used:  # the share has no divisor near, such as a prime number
        split = split_evenly(per_device, bound=used // 2 // step * step, step=step)
    size, last = split.micro_batch, split.last_micro_batch
    reasons = {
        **plan.reasons,
        "micro_batch": f"NOTE: no memory for {used}; {size} is the next that splits {per_device}",
        "accumulation": f"{split.accumulation} for {per_device} samples per device and optimizer step",
        "last_micro_batch": "all are of one size" if last == size else "what remains",
        "memory": "less than at the micro-batch at which it ran out",
    }
    if plan.cuda_graphs:
        from lib.plan.compile_parts import ACCUMULATES

        reasons["cuda_graphs"] = f"NOTE: CONFIG_CUDA_GRAPHS=y has no effect: {ACCUMULATES}"
    return replace(plan, **asdict(split), memory=None, cuda_graphs=False, reasons=reasons)
