"""LatentWire's elastic configuration for 1 to 4 and more GPUs, as a policy of the planner. Pure.

Its rules depend on the number of GPUs and on whether all are H100s. They divide a model by the number of GPUs
that hold its layers as if the parts were equal. Differences here: a device counts the models that it holds,
whole, also on H100s; no batch is below one; and the effective batch is the requested one on any number of
GPUs, unless it is set to grow. `document_batch` gives the rules unchanged.

With two frozen models they choose the layout of the two, else a replica on each GPU. `document_facts` has the
two models of the rules, to be planned like any others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from lib.config import Config
from lib.errors import PlanError
from lib.plan.placement import Placement
from lib.plan.types import OWN_MEMORY, Branch, ConfigView, Layout, ModelFacts, Precision, rank_shares
from lib.units import GB, bytes_text

Models: TypeAlias = Literal["both", "llama", "qwen"]

MODEL_GB: Mapping[str, float] = MappingProxyType({"llama": 14, "qwen": 13})
OPTIMIZER_GB = 4  # the rules count it on a single GPU only
SAMPLE_GB = 0.75  # activations of a sample of 256 tokens
WEIGHT_BYTES = 4  # here trained weights are fp32
FLOOR_GB = 1  # minimum memory for samples on a single GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """strategy: the rules' name. branch_devices: as of Layout, () for replicas on all GPUs."""

    strategy: str
    branch_devices: tuple[int, ...]
    copies: int
    share: float  # of the models that one GPU holds, as the rules count
    document_per_copy: int | None = None  # where the rules ignore the memory


def apply_policy(
    config: ConfigView, facts: ModelFacts, placement: Placement, *, precision: Precision
) -> tuple[ConfigView, Layout, dict[str, str]]:
    """Apply the rules to a model, with its own weights and activations in place of their table.

    Returns `config` with the policy's decisions in place of automatic settings, the layout, and the reasons.
    Raises PlanError where the model's size is unknown or not one sample fits.
    """
    base, devices = config.elastic_base_batch, placement.world.value
    assert base is not None
    rule = _rule(devices, all_h100="H100" in placement.name, base_batch=base)
    splits = facts.branches is not None and placement.device.value in OWN_MEMORY and rule.branch_devices
    layout = Layout(strategy="ddp" if devices > 1 else "single", world=devices, shard=1)
    if splits:
        layout = Layout(strategy="split", world=1, shard=1, branch_devices=rule.branch_devices)
    at_once = min(layout.branch_devices, default=1)  # devices of a process that each compute a batch
    most, why = _capacity(config, facts, placement, layout, precision=precision)
    if at_once > 1:
        most, why = at_once * most, f"{why}, on {at_once} devices at once"
    target, why_target = config.target_effective_batch, "CONFIG_TARGET_EFFECTIVE_BATCH"
    if config.elastic_scale_batch:
        target = base * layout.world * at_once
        why_target = f"CONFIG_ELASTIC_SCALE_BATCH=y: GROWS with the devices, {base} for each"
    elif not target:
        target, why_target = base, "CONFIG_ELASTIC_BASE_BATCH"
    step = (config.norm_batch or 1) if facts.has_batchnorm else 1
    # A target that cannot be shared is refused later, with suggestions.
    share = max(step, rank_shares(target, world=layout.world, unit=step)[0])
    sizes = [size for size in range(step, share + 1, step) if share % size == 0 and size <= most]
    assert isinstance(config, Config)  # a foreign object has no such policy
    changed = config.replace(
        hyper_param="manual",
        auto_method=None,
        batch_size=max(sizes, default=step),
        gradient_accumulation=0,
        target_effective_batch=target,
    )
    strategy = "LatentWire's policy replicates the model on every device"
    if facts.branches is not None:
        strategy = f"LatentWire's policy: {rule.strategy}" + (
            "" if splits or not rule.branch_devices else f", on a {placement.device.value} as replicas"
        )
    return changed, layout, {"micro_batch": why, "target": why_target, "strategy": strategy}


def _capacity(
    config: ConfigView, facts: ModelFacts, placement: Placement, layout: Layout, *, precision: Precision
) -> tuple[int, str]:
    """Return the samples that a device takes at once, and why. Raises PlanError as `apply_policy`."""
    base, util = config.elastic_base_batch, config.elastic_target_util
    assert base is not None and util is not None
    if facts.parameters is None or not facts.bytes_per_sample:
        raise PlanError(
            "LatentWire's policy needs the size of the model and of a sample",
            why=f"{facts.name} is known by name only",
            todo="set CONFIG_ELASTIC_POLICY_PLANNER=y",
        )
    branches = facts.branches or ()
    frozen = [each.parameters * (4 if precision == "fp32" else 2) for each in branches]
    frozen_bytes = max(frozen) if layout.strategy == "split" else sum(frozen)
    optimizer_gb = OPTIMIZER_GB if layout.devices == 1 else 0
    available_gb = util / 100 * placement.total_bytes / GB
    left_bytes = round((available_gb - optimizer_gb) * GB) - WEIGHT_BYTES * facts.parameters - frozen_bytes
    room = left_bytes // (facts.bytes_per_sample + sum(each.bytes_per_sample for each in branches))
    why = (
        f"LatentWire's rule: {util} % of {placement.total_bytes / GB:.1f} GB"
        + (f" less {OPTIMIZER_GB} GB" if optimizer_gb else "")
        + (f" and {bytes_text(frozen_bytes)} of frozen models" if frozen_bytes else "")
        + f" and the weights leaves room for {room}, at most {base}"
    )
    if room < 1:
        raise PlanError(
            "LatentWire's policy has no batch here", why=why, todo="set CONFIG_ELASTIC_POLICY_PLANNER=y"
        )
    return min(room, base), why


def document_facts() -> ModelFacts:
    """Return the two models of the rules, as they count them."""
    llama, qwen = (
        Branch(flop_per_sample=0.0, parameters=round(MODEL_GB[name] * GB / 2)) for name in ("llama", "qwen")
    )
    return ModelFacts(
        name="Llama-8B and Qwen-7B",
        parameters=0,
        bytes_per_sample=round(SAMPLE_GB * GB),
        train_size=None,
        has_batchnorm=False,
        branches=(llama, qwen),
    )


def document_batch(*, gpu_name: str, total_bytes: Sequence[int], models: Models = "both") -> int:
    """Return samples at once on all GPUs by the unchanged rules; may be negative."""
    rule = _rule(len(total_bytes), all_h100="H100" in gpu_name, base_batch=64)
    if rule.document_per_copy is not None:
        return rule.document_per_copy * rule.copies
    raw = _samples(rule, total_bytes, model_gb=_model_gb(models), target_util=0.75)
    return min(64, raw) * rule.copies


def _rule(count: int, *, all_h100: bool, base_batch: int) -> _Rule:
    if count == 1:
        return _Rule(strategy="single_gpu", branch_devices=(), copies=1, share=1)
    if count in (2, 4) and all_h100:
        name = "ddp" if count == 2 else "ddp_4gpu"
        return _Rule(strategy=name, branch_devices=(), copies=count, share=1, document_per_copy=base_batch)
    if count == 2:
        return _Rule(strategy="model_split", branch_devices=(1, 1), copies=1, share=1)
    if count == 3:
        return _Rule(strategy="hybrid_3gpu", branch_devices=(2, 1), copies=1, share=1 / 2)
    if count == 4:
        return _Rule(strategy="hybrid_4gpu", branch_devices=(2, 2), copies=2, share=1 / 2)
    return _Rule(strategy=f"ddp_{count}gpu", branch_devices=(), copies=count, share=1 / 4)


def _samples(rule: _Rule, total_bytes: Sequence[int], *, model_gb: float, target_util: float) -> int:
    """Return the samples that one replica has room for; zero or less where the models alone are too large."""
    available_gb = target_util * min(total_bytes) / GB
    left_gb = available_gb - rule.share * model_gb
    if len(total_bytes) == 1:
        return max(1, int(max(FLOOR_GB, left_gb - OPTIMIZER_GB) / SAMPLE_GB))
    return int(left_gb / SAMPLE_GB)


def _model_gb(models: Models) -> float:
    return MODEL_GB[models] if models in MODEL_GB else sum(MODEL_GB.values())
