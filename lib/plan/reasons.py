"""Sentences that explain sizes."""

from __future__ import annotations

from lib.plan.asked import Asked
from lib.plan.probing import Probed
from lib.plan.types import Memory, ModelFacts
from lib.tables import GB


def told(memory: Memory) -> str:
    """The need and what there is for it, in words."""
    return f"{memory.need_bytes / GB:.2f} GB of {memory.usable_bytes / GB:.2f} GB usable"


def why_memory(memory: Memory | None, probed: Probed | None) -> str:
    """What the prediction is made of, and what was measured instead, if it was."""
    if memory is None:
        return "not predicted"
    measured = f"measured: {probed.chosen.need_bytes / GB:.2f} GB" if probed is not None else "not measured"
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {byte_count / GB:.2f}" for name, byte_count in parts)
    more = "" if memory.fits else "MORE than there is: "
    reserve = f"in reserve {memory.reserve_bytes / GB:.2f}"
    return f"{more}{told(memory)}, of which {listed} and {reserve}; predicted, {measured}"


def why_target(config: Asked) -> str:
    """Where the effective batch that is aimed at comes from."""
    if config.target_effective_batch:
        return f"CONFIG_TARGET_EFFECTIVE_BATCH={config.target_effective_batch}"
    if config.hyper_param == "manual" and config.gradient_accumulation:
        return "follows from CONFIG_BATCH_SIZE and CONFIG_GRADIENT_ACCUMULATION"
    return f"recommended for {config.model} (CONFIG_TARGET_EFFECTIVE_BATCH=0)"


def why_norm_batch(facts: ModelFacts, *, norm_batch: int) -> str:
    """What batch normalisation takes its statistics over."""
    if not facts.has_batchnorm:
        return "the model has no batch normalisation"
    if norm_batch:
        return f"statistics over groups of {norm_batch} samples, on every machine alike"
    return "statistics follow the micro-batch: not portable to machines that cut the batch differently"
