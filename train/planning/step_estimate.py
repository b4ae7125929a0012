"""Estimated time of the step of a plan, from the traced step."""

from __future__ import annotations

from dataclasses import replace

from lib.config import Config
from lib.plan.gpus import Gpu, find_gpu
from lib.plan.roofline import StepTime, StepWork, estimate_step_time
from lib.plan.sharding import Links, traffic_seconds
from lib.plan.stages import idle_share, pipeline_seconds, slowest_stage, stages_of
from lib.plan.types import Hardware, ModelFacts, Plan
from train.planning.memory_estimate import MemoryTrace
from train.training_data import TrainingData


def gpu_of_hardware(hardware: Hardware) -> Gpu | None:
    """Return the catalogue's row of the first device; None for a CPU, and for other unknown devices."""
    return None if hardware.kind == "cpu" else find_gpu(hardware.devices[0].name)


def rows_of(plan: Plan) -> int:
    """Return the rows of the micro-batches of the first device, padding included."""
    return sum(plan.micro_batches_of(0)[0])


def step_flop_of(plan: Plan, found: MemoryTrace, facts: ModelFacts) -> int:
    """Return the FLOP of one device in a step of `plan`, of which at most two micro-batches were traced."""
    flop = found.step_flop * rows_of(plan) // (plan.micro_batch * (2 if plan.accumulation > 1 else 1))
    if plan.strategy == "pipeline":
        flop = round(flop * max(stage.work for stage in stages_of(facts, plan.layout)))
    return flop


def links_of(config: Config, hardware: Hardware) -> Links | None:
    """Return the links between the devices; None where `gpu_of_hardware` is."""
    gpu = gpu_of_hardware(hardware)
    return None if gpu is None else Links.of(gpu, config, per_node=hardware.per_node)


def step_time_of(
    plan: Plan, found: MemoryTrace, data: TrainingData, config: Config, hardware: Hardware
) -> StepTime | None:
    """Estimate the time of a step of `plan`, traced as `found`; None where `gpu_of_hardware` is."""
    gpu, links = gpu_of_hardware(hardware), links_of(config, hardware)
    if gpu is None or links is None:
        return None
    parts = found.trace.at_peak()
    # Work is in proportion to rows: the last micro-batch may have fewer.
    rows, frozen_bytes = rows_of(plan), parts.get("frozen models", 0)
    copied_bytes = found.copied_bytes * rows // plan.micro_batch
    if plan.strategy == "sequential":  # both are copied and read, but only one of them is there at the peak
        frozen_bytes = sum(branch.weight_bytes(plan.precision) for branch in data.facts.branches or ())
        copied_bytes += frozen_bytes * plan.accumulation
    pipeline = plan.strategy == "pipeline"
    work = StepWork(
        flop=step_flop_of(plan, found, data.facts),
        accumulation=plan.accumulation,
        weight_bytes=parts.get("parameters", 0),
        gradient_bytes=parts.get("parameters", 0),
        optimizer_bytes=parts.get("optimizer", 0),
        activation_bytes=parts.get("activations", 0) * rows // plan.micro_batch,
        frozen_bytes=frozen_bytes,
        launches=found.launches.of_step(plan.accumulation),
        copied_bytes=copied_bytes,
    )
    if pipeline:
        work = replace(slowest_stage(work, data.facts, plan.layout), flop=work.flop)
    units = () if pipeline else data.facts.units or ()
    traffic = traffic_seconds(units, plan.layout, links, accumulation=plan.accumulation)
    time = estimate_step_time(work, gpu, precision=plan.precision, compiled=plan.compile, traffic=traffic)
    if pipeline:
        sizes = {"samples": plan.shares[0], "accumulation": plan.accumulation}
        fast, slow = (
            pipeline_seconds(each, data.facts, plan.layout, links, **sizes)
            for each in (time.fastest_seconds, time.slowest_seconds)
        )
        idle = idle_share(plan.layout, accumulation=plan.accumulation)
        reason = f"{time.reason}; of the slowest stage, which waits {idle:.1%} of a step and for exchanges"
        return replace(time, fastest_seconds=fast, slowest_seconds=slow, reason=reason)
    if "blocks" in plan.compile_parts:
        time = replace(time, reason=f"{time.reason}; what is between blocks is counted as compiled, too")
    if "update" in plan.compile_parts:
        counted = f"the update is compiled, but counted with its {found.launches.update:,} operators"
        return replace(time, reason=f"{time.reason}; {counted}")
    return time
