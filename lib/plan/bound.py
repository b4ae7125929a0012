"""Upper bound of the micro-batch on a device, from the free-memory table."""

from __future__ import annotations

from lib.errors import PlanError
from lib.plan.config_view import ConfigView, Decision
from lib.plan.placement import Placement
from lib.plan.tables import (
    ACTIVATION_FACTOR,
    BYTES_PER_PARAMETER,
    CPU_BATCH,
    FREE_MEMORY_MARGIN,
    GPU_CONTEXT_BYTES,
    TIERS,
    TINY_FREE_BYTES,
    Tier,
)
from lib.plan.types import ModelFacts
from lib.units import GB


def table_batch(free_bytes: int, *, scale: float, compiled: bool) -> int:
    """Return the micro-batch that the free-memory table gives for a GPU with `free_bytes` of free memory."""
    tier = _tier(free_bytes)
    return _scaled(tier.compiled if compiled else tier.eager, scale)


def cpu_table_batch(*, scale: float) -> int:
    """Return the micro-batch that the free-memory table gives for a CPU."""
    return _scaled(CPU_BATCH, scale)


def table_bound(config: ConfigView, placement: Placement, *, compiled: bool) -> Decision[int]:
    """Return the table's micro-batch for this device and its reason. Raises PlanError without a scale."""
    scale, free = config.table_scale, placement.free_bytes
    if scale is None:
        raise PlanError(
            f"the batch size of {config.model} cannot be chosen automatically",
            why=f"models/{config.model}/Kconfig gives it no TABLE_SCALE",
            todo="set CONFIG_HYPER_PARAM_MANUAL=y and CONFIG_BATCH_SIZE",
        )
    tiny = f"; only {_gb(free)} is free, which may not do" if free < TINY_FREE_BYTES else ""
    scaled = f"x {scale} for {config.model}"
    if placement.device.value == "cpu":
        batch = cpu_table_batch(scale=scale)
        return Decision(batch, f"{CPU_BATCH} on a CPU, {scaled} = {batch}{tiny}")
    tier = _tier(free)
    batch = table_batch(free, scale=scale, compiled=compiled)
    base, mode = (tier.compiled, "with") if compiled else (tier.eager, "without")
    return Decision(
        batch,
        f"free memory {_gb(free)} x {FREE_MEMORY_MARGIN} = {_gb(free * FREE_MEMORY_MARGIN)} is in the "
        f"{tier.usable_gb} GB tier: {base} {mode} compile, {scaled} = {batch}{tiny}",
    )


def raise_to_norm_batch(
    bound: Decision[int], placement: Placement, facts: ModelFacts, *, norm_batch: int
) -> Decision[int]:
    """Return the bound, or NORM_BATCH where that is larger and estimated to fit.

    Raises PlanError where it does not fit, or where it cannot be estimated.
    """
    if bound.value >= norm_batch:
        return bound
    usable = placement.free_bytes * FREE_MEMORY_MARGIN
    remedies = (
        f"set CONFIG_NORM_BATCH to {bound.value} or less (on all machines alike), "
        "or to 0 for plain batch normalisation, which is not portable"
    )
    what = f"CONFIG_NORM_BATCH={norm_batch} is more than the free-memory table gives: {bound.reason}"
    if facts.parameters is None or facts.bytes_per_sample is None:
        raise PlanError(what, why=f"what {facts.name} would need for it is not known", todo=remedies)
    context = 0 if placement.device.value == "cpu" else GPU_CONTEXT_BYTES
    activations = norm_batch * facts.bytes_per_sample * ACTIVATION_FACTOR
    need = facts.parameters * BYTES_PER_PARAMETER + activations + context
    estimate = (
        f"about {_gb(need)} of {_gb(usable)} usable ({facts.parameters:,} parameters x "
        f"{BYTES_PER_PARAMETER} bytes + {norm_batch} samples x {facts.bytes_per_sample / 1e6:.1f} MB x "
        f"{ACTIVATION_FACTOR}{f' + {_gb(context)} of GPU context' if context else ''})"
    )
    if need > usable:
        raise PlanError(what, why=f"it would need {estimate}", todo=remedies)
    raised = f"raised to NORM_BATCH = {norm_batch}, which needs {estimate}"
    return Decision(norm_batch, f"{bound.reason}; {raised}")


def _tier(free_bytes: int) -> Tier:
    usable_bytes = free_bytes * FREE_MEMORY_MARGIN
    return next(tier for tier in TIERS if usable_bytes >= tier.usable_gb * GB)


def _scaled(base: int, scale: float) -> int:
    return max(1, int(base * scale))


def _gb(count_bytes: float) -> str:
    return f"{count_bytes / GB:.1f} GB"
