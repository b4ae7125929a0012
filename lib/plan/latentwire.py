"""LatentWire's elastic configuration of two frozen models on 1 to 4 and more GPUs, as a policy. Pure.

Its rules depend on the number of GPUs and on whether all are H100s. They take the sizes of the two models, of
the optimizer and of a sample from a table, and divide a model by the number of GPUs that hold its layers as
if the parts were equal. Differences here: no batch is below one, the memory of H100s is checked too, and the
effective batch is the requested one on any number of GPUs, unless it is set to grow. `document_batch` gives
the rules unchanged.

Two models are trained by models/latentwire, with the planner's layouts. `apply_policy` applies the rules to
one model on each GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from lib.config import Config
from lib.errors import PlanError
from lib.plan.placement import Placement
from lib.plan.types import ConfigView, ModelFacts, rank_shares
from lib.units import GB

Models: TypeAlias = Literal["both", "llama", "qwen", "sequential"]

MODEL_GB: Mapping[str, float] = MappingProxyType({"llama": 14, "qwen": 13})
OPTIMIZER_GB = 4  # the rules count it on a single GPU only
SAMPLE_GB = 0.75  # activations of a sample of 256 tokens
WEIGHT_BYTES = 4  # here weights are fp32
FLOOR_GB = 1  # minimum memory for samples on a single GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """Result of the policy for some GPUs.

    layout: component -> GPUs that its layers are spread over or copied to; empty without a GPU.
    copies: replicas of both models; each computes its share of a step.
    capacity: samples that one replica takes at once; at least one.
    document_batch: samples at once on all GPUs by the unchanged rules; may be negative.
    micro_batches: of each replica in one optimizer step. Their sum is exactly the effective batch.
    """

    strategy: str
    layout: Mapping[str, tuple[int, ...]]
    copies: int
    capacity: int
    document_batch: int
    effective_batch: int
    micro_batches: tuple[tuple[int, ...], ...]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    strategy: str
    layout: Mapping[str, tuple[int, ...]]
    copies: int
    share: float  # of the models that one GPU holds
    document_per_copy: int | None = None  # where the rules ignore the memory


def latentwire(
    *,
    gpu_name: str,
    total_bytes: Sequence[int],
    models: Models = "both",
    target: int = 0,
    base_batch: int = 64,
    target_util: float = 0.75,
    scale_batch: bool = False,
) -> Elastic:
    """Apply the policy to GPUs called `gpu_name` with `total_bytes` of memory each; no GPUs: a CPU.

    models:      the models trained for; "sequential": both, one after the other on the same GPUs.
    target:      samples per optimizer step; 0: `base_batch`.
    target_util: share of the memory to use.
    scale_batch: `base_batch` samples for every replica instead, which changes the mathematics.

    Raises PlanError where not one sample fits, or the effective batch is smaller than the number of replicas.
    """
    rule = _rule(len(total_bytes), all_h100="H100" in gpu_name, base_batch=base_batch)
    raw = _samples(rule, total_bytes, model_gb=_model_gb(models), target_util=target_util)
    if raw < 1:
        raise PlanError(
            f"LatentWire's policy has no batch for {len(total_bytes)} x {gpu_name}",
            why=f"{rule.strategy} leaves room for {raw} samples",
            todo="use more or larger GPUs, one model after the other, or CONFIG_ELASTIC_POLICY_PLANNER=y",
        )
    capacity = min(raw, base_batch)
    effective = base_batch * rule.copies if scale_batch else target or base_batch
    if effective < rule.copies:
        raise PlanError(
            f"an effective batch of {effective} cannot be shared by {rule.copies} copies",
            todo="raise CONFIG_TARGET_EFFECTIVE_BATCH or use fewer GPUs",
        )
    document = rule.document_per_copy if rule.document_per_copy is not None else capacity
    note = "effective batch as requested on any number of GPUs"
    if scale_batch:
        note = f"GROWS with the GPUs ({rule.copies} x {base_batch}): other mathematics on every machine"
    return Elastic(
        strategy=rule.strategy,
        layout=rule.layout,
        copies=rule.copies,
        capacity=capacity,
        document_batch=document * rule.copies,
        effective_batch=effective,
        micro_batches=tuple(
            rank_shares(share, world=-(-share // capacity))
            for share in rank_shares(effective, world=rule.copies)
        ),
        note=note,
    )


def apply_policy(
    config: ConfigView, facts: ModelFacts, placement: Placement
) -> tuple[ConfigView, dict[str, str]]:
    """Apply the rules to one model instead of two: its own weights and activations replace their table.

    Returns `config` with the policy's decisions in place of automatic settings, and the reasons. Raises
    PlanError where the model's size is unknown or not one sample fits.
    """
    base, util = config.elastic_base_batch, config.elastic_target_util
    assert base is not None and util is not None
    world = placement.world.value
    if facts.parameters is None or not facts.bytes_per_sample:
        raise PlanError(
            "LatentWire's policy needs the size of the model and of a sample",
            why=f"{facts.name} is known by name only",
            todo="set CONFIG_ELASTIC_POLICY_PLANNER=y",
        )
    optimizer_gb = OPTIMIZER_GB if world == 1 else 0
    available_gb = util / 100 * placement.total_bytes / GB
    left_bytes = round((available_gb - optimizer_gb) * GB) - WEIGHT_BYTES * facts.parameters
    capacity = min(left_bytes // facts.bytes_per_sample, base)
    rule = (
        f"LatentWire's rule: {util} % of {placement.total_bytes / GB:.1f} GB"
        + (f" less {OPTIMIZER_GB} GB" if optimizer_gb else "")
        + f" and the weights leaves room for {left_bytes // facts.bytes_per_sample}, at most {base}"
    )
    if capacity < 1:
        raise PlanError(
            "LatentWire's policy has no batch here", why=rule, todo="set CONFIG_ELASTIC_POLICY_PLANNER=y"
        )
    target, why_target = config.target_effective_batch, "CONFIG_TARGET_EFFECTIVE_BATCH"
    if config.elastic_scale_batch:
        target = base * world
        why_target = f"CONFIG_ELASTIC_SCALE_BATCH=y: GROWS with the devices, {base} for each"
    elif not target:
        target, why_target = base, "CONFIG_ELASTIC_BASE_BATCH"
    step = (config.norm_batch or 1) if facts.has_batchnorm else 1
    # A target that cannot be shared is refused later, with suggestions.
    share = max(step, rank_shares(target, world=world, unit=step)[0])
    sizes = [size for size in range(step, share + 1, step) if share % size == 0 and size <= capacity]
    assert isinstance(config, Config)  # a foreign object has no such policy
    changed = config.replace(
        hyper_param="manual",
        auto_method=None,
        batch_size=max(sizes, default=step),
        gradient_accumulation=0,
        target_effective_batch=target,
        dist_strategy="ddp",
    )
    strategy = "LatentWire's policy replicates the model on every device"
    return changed, {"micro_batch": rule, "target": why_target, "strategy": strategy}


def document_batch(*, gpu_name: str, total_bytes: Sequence[int], models: Models = "both") -> int:
    """Return samples at once on all GPUs by the unchanged rules; may be negative."""
    rule = _rule(len(total_bytes), all_h100="H100" in gpu_name, base_batch=64)
    if rule.document_per_copy is not None:
        return rule.document_per_copy * rule.copies
    raw = _samples(rule, total_bytes, model_gb=_model_gb(models), target_util=0.75)
    return min(64, raw) * rule.copies


def _rule(count: int, *, all_h100: bool, base_batch: int) -> _Rule:
    every = tuple(range(count))
    copied = {"encoder": every, "llama": every, "qwen": every}
    if count == 0:
        return _Rule(strategy="single_device", layout={}, copies=1, share=0, document_per_copy=1)
    if count == 1:
        return _Rule(strategy="single_gpu", layout=copied, copies=1, share=1)
    if count in (2, 4) and all_h100:
        name = "ddp" if count == 2 else "ddp_4gpu"
        return _Rule(strategy=name, layout=copied, copies=count, share=1, document_per_copy=base_batch)
    if count == 2:
        split = {"encoder": (0,), "llama": (0,), "qwen": (1,)}
        return _Rule(strategy="model_split", layout=split, copies=1, share=1)
    if count == 3:
        layout = {"encoder": (0,), "llama": (0, 1), "qwen": (2,)}
        return _Rule(strategy="hybrid_3gpu", layout=layout, copies=1, share=1 / 2)
    if count == 4:
        layout = {"encoder": (0,), "llama": (0, 1), "qwen": (2, 3)}
        return _Rule(strategy="hybrid_4gpu", layout=layout, copies=2, share=1 / 2)
    return _Rule(strategy=f"ddp_{count}gpu", layout=copied, copies=count, share=1 / 4)


def _samples(rule: _Rule, total_bytes: Sequence[int], *, model_gb: float, target_util: float) -> int:
    """Return the samples that one replica has room for; zero or less where the models alone are too large."""
    if not total_bytes:
        return 1
    available_gb = target_util * min(total_bytes) / GB
    left_gb = available_gb - rule.share * model_gb
    if len(total_bytes) == 1:
        return max(1, int(max(FLOOR_GB, left_gb - OPTIMIZER_GB) / SAMPLE_GB))
    return int(left_gb / SAMPLE_GB)


def _model_gb(models: Models) -> float:
    if models in MODEL_GB:
        return MODEL_GB[models]
    return max(MODEL_GB.values()) if models == "sequential" else sum(MODEL_GB.values())
