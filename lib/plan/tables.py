"""Look-up tables of planning: free memory, models, deny-list, bf16 hardware, compute tiers.

Memory is in decimal GB (1e9 bytes), as GPU vendors print it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lib import plugins
from lib.errors import PlanError
from lib.plan.placement import Placement
from lib.plan.types import ConfigView, Decision, ModelFacts
from lib.units import GB

FREE_MEMORY_MARGIN = 0.8  # share of the free memory that a plan may use


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One row of the free-memory table: samples per micro-batch before the model's scale."""

    usable_gb: int  # inclusive lower bound of the row, after the margin
    compiled: int
    eager: int


TIERS = (
    Tier(usable_gb=128, compiled=256, eager=128),
    Tier(usable_gb=64, compiled=128, eager=64),
    Tier(usable_gb=32, compiled=32, eager=16),
    Tier(usable_gb=16, compiled=16, eager=8),
    Tier(usable_gb=8, compiled=8, eager=4),
    Tier(usable_gb=4, compiled=4, eager=2),
    Tier(usable_gb=0, compiled=2, eager=1),
)

CPU_BATCH = 16  # samples per micro-batch on a CPU, before the model's scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A model known by name alone, for callers without a Config of their own.

    The last two are for 3x224x224 images and 1000 classes, and only given where batch normalisation may make
    the planner estimate memory.
    """

    scale: float
    recommended_target: int
    has_batchnorm: bool
    parameters: int | None = None
    bytes_per_sample: int | None = None  # activations saved for backward, fp32


MODELS: Mapping[str, ModelRow] = MappingProxyType(
    {
        "gpt2": ModelRow(scale=1.0, recommended_target=1024, has_batchnorm=False),
        "resnet50": ModelRow(
            scale=1.5,
            recommended_target=256,
            has_batchnorm=True,
            parameters=25_557_032,
            bytes_per_sample=85_913_512,
        ),
        "resnet18": ModelRow(
            scale=2.0,
            recommended_target=512,
            has_batchnorm=True,
            parameters=11_689_512,
            bytes_per_sample=22_183_848,
        ),
        "lenet5": ModelRow(scale=4.0, recommended_target=512, has_batchnorm=False),
    }
)


# GPUs on which torch.compile stays off unless it is set by hand: substring of the device name, and why.
COMPILE_DENY_LIST = {
    "W7900": "known ROCm faults with torch.compile",
    "MI210": "torch.compile is not stable on it",
}

COMPILE_CAPABILITY = (7, 0)  # minimum of Triton, torch.compile's code generator

BF16_CAPABILITY = (8, 0)  # CUDA compute capability of the first GPUs with bf16 units (Ampere)
FP16_CAPABILITY = (7, 0)  # first with fp16 tensor cores (Volta)

# AMD GPUs have no CUDA capability: those with fast bf16 units are listed as case-insensitive substrings of
# the device name: Instinct from CDNA 2 on, and of the Radeons (RDNA 3) those with the largest die.
BF16_ROCM_PATTERNS = ("MI200", "MI210", "MI250", "MI300", "MI308", "MI325", "MI350", "MI355", "7900")

# Estimate of training memory: fp32 weight, gradient and two optimizer moments; activations with room
# for what backward allocates; what a GPU context and its libraries take before the first tensor.
BYTES_PER_PARAMETER = 16
ACTIVATION_FACTOR = 1.5
GPU_CONTEXT_BYTES = 1_500_000_000

# Added by a prediction to the peak of live tensors: a share for kernels' workspace, which it does not see,
# more for compiled steps (found for ResNet-18 on a CPU), and the memory of a device's context and libraries:
# what half of a published list for a 24 GiB card needed (docs/benchmarks/memory.md for all).
PEAK_FACTOR = 1.02
COMPILED_PEAK_FACTOR = 1.075
GPU_RESERVE_BYTES = 1_610_612_736  # 1.5 GiB

TINY_FREE_BYTES = 10**9  # below this a plan warns that even its smallest batch may not fit

# Settings of the compute tiers. TOML has lists only.
TIER_CONFIGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        tier: settings | {"experiments": tuple(settings["experiments"])}
        for tier, settings in tomllib.loads(Path(__file__).with_name("tiers.toml").read_text("utf-8")).items()
    }
)
# Advertised memory of the smallest device at which a tier begins. Drivers report up to 7 % less.
TIER_1_GB, TIER_2_GB, TIER_3_GB = 6, 16, 40
TIER_4_DEVICES = 4  # of at least TIER_3_GB
ADVERTISED_SHARE = 0.93


def table_batch(free_bytes: int, *, scale: float, compiled: bool) -> int:
    """Return the micro-batch that the free-memory table gives for a GPU with `free_bytes` of free memory."""
    tier = _tier(free_bytes)
    return max(1, int((tier.compiled if compiled else tier.eager) * scale))


def cpu_table_batch(*, scale: float) -> int:
    """Return the micro-batch that the free-memory table gives for a CPU."""
    return max(1, int(CPU_BATCH * scale))


def table_bound(config: ConfigView, placement: Placement, *, compiled: bool) -> Decision[int]:
    """Return the table's micro-batch for this device and its reason. Raises PlanError without a scale."""
    scale, free = config.table_scale, placement.free_bytes
    if scale is None:
        raise PlanError(
            f"the batch size of {config.model} cannot be chosen automatically",
            why=f"{plugins.MODELS.place(config.model)}/Kconfig gives it no TABLE_SCALE",
            todo="set CONFIG_HYPER_PARAM_MANUAL=y and CONFIG_BATCH_SIZE",
        )
    tiny = f"; NOTE: only {_gb(free)} is free, which may not do" if free < TINY_FREE_BYTES else ""
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


def strict_bound(
    config: ConfigView, placement: Placement, *, compiled: bool, norm_batch: int
) -> Decision[int]:
    """Return the table's micro-batch as it stands. Raises PlanError if `norm_batch` does not divide it."""
    bound = table_bound(config, placement, compiled=compiled)
    if norm_batch and bound.value % norm_batch:
        raise PlanError(
            f"CONFIG_BATCH_TABLE_STRICT=y gives micro-batches of {bound.value}, "
            f"not a multiple of CONFIG_NORM_BATCH={norm_batch}",
            why=bound.reason,
            todo="set CONFIG_NORM_BATCH=0 (not portable), or CONFIG_BATCH_TABLE_STRICT=n",
        )
    return bound


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


def _gb(count_bytes: float) -> str:
    return f"{count_bytes / GB:.1f} GB"
