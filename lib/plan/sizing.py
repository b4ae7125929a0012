"""Batch sizes of a run: the split of its effective batch over devices and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lib.errors import PlanError
from lib.plan.fitting import (
    LARGEST_TARGET,
    MemoryEstimator,
    Split,
    StepSettings,
    enough_turns,
    largest_fitting,
    nearest_targets,
    predicted,
    sizes_to_try,
    smallest_accepted,
    split_by,
    split_evenly,
    split_under,
)
from lib.plan.placement import STEP_COMPILER, Placement
from lib.plan.show import (
    format_need,
    no_room,
    offload_note,
    why_divisor,
    why_effective,
    why_memory,
    why_norm_batch,
    why_target,
)
from lib.plan.tables import cpu_table_batch, raise_to_norm_batch, strict_bound, table_bound
from lib.plan.types import STATIC_SHAPES, ConfigView, Decision, Layout, Memory, ModelFacts, rank_shares
from lib.units import bytes_text, counted

if TYPE_CHECKING:
    from lib.plan.probe_search import Probed


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingContext:
    """Input of every choice of sizes: what is trained where, and how its steps are computed.

    `step` has everything but the micro-batch and the accumulation, which are chosen.
    """

    config: ConfigView
    facts: ModelFacts
    placement: Placement
    step: StepSettings
    even: bool = False  # the caller cannot run a smaller last micro-batch, nor unequal shares
    predict: MemoryEstimator | None = None
    probed: Probed | None = None  # probe runs on this hardware

    @property
    def layout(self) -> Layout:
        """Layout over processes."""
        assert self.step.layout is not None
        return self.step.layout

    @property
    def replicas(self) -> int:
        """Number of processes that share the batch."""
        return self.layout.replicas

    @property
    def norm_batch(self) -> int:
        """Samples that are normalised together; 0: all of a micro-batch."""
        return self.step.norm_batch

    @property
    def unit(self) -> int:
        """Samples that shares and micro-batches are multiples of."""
        return self.norm_batch or 1

    @property
    def replica_noun(self) -> str:
        """The unit that gets a share of the batch, for messages."""
        if self.layout.strategy == "pipeline":
            return "pipelines"
        each = self.layout.devices_per_process
        return {1: "devices", 2: "pairs of devices"}.get(each, f"groups of {each} devices")

    @property
    def why_one_shape(self) -> str:
        """Reason why smaller micro-batches are padded to the size of the others; "" if they are not."""
        if self.step.device in STATIC_SHAPES:
            return STEP_COMPILER
        return "torch.compile" if self.step.compile else "stages" * (self.layout.strategy == "pipeline")

    @property
    def why_divisor_only(self) -> str:
        """Reason why all micro-batches must be of one size and without padding; "" if they need not be."""
        if self.facts.has_batchnorm and not self.norm_batch:
            return "batch normalisation over the micro-batch"
        return "this caller" if self.even else ""

    @property
    def prefers_divisor(self) -> bool:
        """True if a divisor of the share is chosen even where a fifth of what fits stays unused."""
        return bool(self.why_divisor_only or self.why_one_shape or self.facts.has_batchnorm)

    def share(self, target: int) -> int:
        """Return the largest share of a process."""
        return rank_shares(target, world=self.replicas, unit=self.unit)[0]

    def memory(self, micro_batch: int, *, accumulates: bool) -> Memory | None:
        """Predict the memory of a micro-batch; None without a predictor."""
        if self.predict is None:
            return None
        step = replace(self.step, micro_batch=micro_batch, accumulates=accumulates)
        return predicted(step, self.predict, free_bytes=self.placement.free_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One parallelism strategy with its best sizes, or with the reason why it is impossible.

    split:   None if it is impossible; so are `memory` and `seconds` then.
    effective: samples of an optimizer step on all devices.
    reasons: by the names of the plan's fields.
    seconds: fastest and slowest estimate of an optimizer step; None where it cannot be estimated.
    why_not: why it is impossible; nearest: the smallest change found that would make it possible.
    verdict: outcome of the comparison with the other strategies.
    """

    context: SizingContext
    split: Split | None = None
    effective: int = 0
    target: int = 0
    memory: Memory | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    seconds: tuple[float, float] | None = None
    why_not: str = ""
    nearest: str = ""
    error: PlanError | None = None
    verdict: str = ""

    @property
    def layout(self) -> Layout:
        """Layout over processes."""
        return self.context.layout

    @property
    def fits(self) -> bool:
        """False if a batch set by hand, or by the table, needs more memory than there is."""
        return self.memory is None or self.memory.fits

    def to_json(self) -> dict[str, Any]:
        """Return the strategy, its sizes and its verdict as a dict that JSON can hold."""
        return {
            "strategy": self.layout.strategy,
            "world": self.layout.world,
            "shard": self.layout.shard,
            "branch_devices": list(self.layout.branch_devices),
            "micro_batch": self.split.micro_batch if self.split is not None else None,
            "accumulation": self.split.accumulation if self.split is not None else None,
            "need_bytes": self.memory.need_bytes if self.memory is not None else None,
            "step_seconds_estimate": list(self.seconds) if self.seconds is not None else None,
            "verdict": self.verdict,
        }


def choose_sizes(context: SizingContext) -> Candidate:
    """Choose micro-batch, accumulation and effective batch.

    Raises PlanError where there is no target, and, with the nearest possible ones, where it cannot be kept.
    """
    config = context.config
    by_hand = config.hyper_param == "manual"
    if not config.target and not (by_hand and config.gradient_accumulation):
        raise PlanError(
            "CONFIG_TARGET_EFFECTIVE_BATCH=0 leaves the effective batch open",
            why=f"the Kconfig of {config.model} gives no RECOMMENDED_TARGET",
            todo="set CONFIG_TARGET_EFFECTIVE_BATCH",
        )
    if by_hand:
        return _manual(context)
    if config.batch_table_strict:
        return _strict(context)
    return _automatic(context) if context.probed is None else _measured(context, context.probed)


def _automatic(context: SizingContext) -> Candidate:
    if context.config.auto_method == "table":
        bound = table_bound(context.config, context.placement, compiled=context.step.compile)
        step = context.norm_batch
        bound = raise_to_norm_batch(bound, context.placement, context.facts, norm_batch=step)
    else:
        bound, step = _predicted_bound(context)
    bound = enough_turns(bound, context.layout, share=context.share(context.config.target))
    only, preferred = context.why_divisor_only, context.prefers_divisor

    def split_share(per_device: int) -> Split | None:
        found = split_under(per_device, bound=bound.value, step=step, divisor_only=preferred)
        return found if found or only else split_evenly(per_device, bound=bound.value, step=step or 1)

    split = _split_target(
        context,
        split_share,
        impossible=f"{only} needs micro-batches of one size, and no divisor of it uses half of what fits "
        f"({bound.reason})",
    )
    divisor = why_divisor(split, bound=bound.value, norm_batch=context.norm_batch)
    return _sizes(context, split, why=bound.reason + divisor)


def _measured(context: SizingContext, probed: Probed) -> Candidate:
    """Return sizes for the best measured micro-batch, which was chosen among those that split the target."""
    split = _split_target(
        context,
        partial(split_by, micro_batch=probed.chosen.micro_batch, divisor_only=bool(context.why_divisor_only)),
        impossible="the measurements are for another one",
    )
    return _sizes(context, split, why=probed.why)


def _predicted_bound(context: SizingContext) -> tuple[Decision[int], int]:
    """Return the largest micro-batch predicted to fit, and the number that it must be a multiple of.

    Raises PlanError, with figures, where none fits.
    """
    config = context.config
    if context.predict is None:
        raise PlanError(
            "there is no model to predict the memory of",
            why=f"{config.model} is known by name only",
            todo="set CONFIG_AUTO_METHOD_TABLE=y",
        )
    share = max(context.unit, context.share(config.target))

    def memory_of(micro_batch: int) -> Memory:
        memory = context.memory(micro_batch, accumulates=micro_batch < share)
        assert memory is not None
        return memory

    step, refusal = smallest_accepted(memory_of, share=share, step=context.norm_batch or 1)
    limit = share
    if context.step.device == "cpu" and config.table_scale is not None:
        # On a CPU caches, not memory, decide the speed: ResNets were slower with all that fits.
        limit = min(share, cpu_table_batch(scale=config.table_scale))
    limit = max(step, limit - limit % step)
    at_limit = "; the whole share of a device fits" if limit == share else "; larger is no faster on CPUs"
    exact, sizes = sizes_to_try(share, limit=limit, step=step, prefers_divisor=context.prefers_divisor)
    at_once = limit == share and context.layout.strategy != "pipeline"  # which takes turns
    bound = largest_fitting(memory_of, sizes, first=exact, at_once=at_once)
    if not bound:
        smallest = replace(context.step, micro_batch=step, accumulates=step < share)
        raise no_room(config, context.placement, memory_of(step), smallest)
    unmeasured = "nothing was measured here yet (make probe); " if config.auto_method == "probe" else ""
    fit = f"{bound} is predicted to need {format_need(memory_of(bound))}"
    beyond = at_limit if bound == sizes[-1] else ""
    if not beyond and sizes is exact:
        more = exact[exact.index(bound) + 1]
        beyond = f" ({more}: {bytes_text(memory_of(more).need_bytes)})"
    return Decision(bound, f"{unmeasured}{fit}{beyond}{refusal}"), step


def _strict(context: SizingContext) -> Candidate:
    compiled, norm_batch = context.step.compile, context.norm_batch
    bound = strict_bound(context.config, context.placement, compiled=compiled, norm_batch=norm_batch)
    batch, target = bound.value, context.config.target
    split = Split.of(batch * max(1, target // (batch * context.replicas)), micro_batch=batch)
    _check_data(context, split, todo="set CONFIG_BATCH_TABLE_STRICT=n")
    effective = split.samples * context.replicas
    return _sizes(context, split, effective, why=f"{bound.reason}, whatever the target")


def _manual(context: SizingContext) -> Candidate:
    config, norm_batch = context.config, context.norm_batch
    batch, accumulation = config.batch_size, config.gradient_accumulation
    if not batch:
        raise PlanError("CONFIG_HYPER_PARAM_MANUAL=y without a batch size", todo="set CONFIG_BATCH_SIZE")
    if norm_batch and batch % norm_batch:
        raise PlanError(
            f"CONFIG_BATCH_SIZE={batch} is not a multiple of CONFIG_NORM_BATCH={norm_batch}",
            todo=f"set it to {-(-batch // norm_batch) * norm_batch}, or CONFIG_NORM_BATCH to "
            f"a divisor of {batch}, or to 0 for plain batch normalisation, which is not portable",
        )
    why = f"CONFIG_BATCH_SIZE={batch}, set by hand"
    if accumulation:
        split = Split.of(batch * accumulation, micro_batch=batch)
        _check_manual_product(context, split)
        effective = split.samples * context.replicas
        return _sizes(context, split, effective, target=effective, why=why)
    only = context.why_divisor_only
    fault = f"does not divide it, and {only} needs micro-batches of one size"
    if batch > context.share(config.target):
        fault = "is more than that"
    split_share = partial(split_by, micro_batch=batch, divisor_only=bool(only))
    split = _split_target(context, split_share, impossible=f"CONFIG_BATCH_SIZE={batch} {fault}")
    return _sizes(context, split, why=why)


def _check_manual_product(context: SizingContext, split: Split) -> None:
    world, target = context.replicas, context.config.target_effective_batch
    effective = split.samples * world
    if target and target != effective:
        raise PlanError(
            f"CONFIG_TARGET_EFFECTIVE_BATCH={target} contradicts CONFIG_BATCH_SIZE={split.micro_batch} x "
            f"CONFIG_GRADIENT_ACCUMULATION={split.accumulation} x {counted(world, 'device')} = {effective}",
            todo="make them agree, or set CONFIG_GRADIENT_ACCUMULATION or CONFIG_TARGET_EFFECTIVE_BATCH to 0",
        )
    _check_data(context, split, todo="lower CONFIG_GRADIENT_ACCUMULATION or CONFIG_BATCH_SIZE")


def _split_target(
    context: SizingContext, split_share: Callable[[int], Split | None], *, impossible: str
) -> Split:
    """Split each device's share of the target.

    impossible: why `split_share` returns None. Raises PlanError with the nearest targets that can be split.
    """
    target = context.config.target
    split, why = _attempt(context, target, split_share, impossible=impossible)
    if split is not None:
        return split
    size, least = context.facts.train_size or LARGEST_TARGET, context.norm_batch * context.replicas
    targets = nearest_targets(
        target,
        works=lambda other: _attempt(context, other, split_share, impossible="")[0] is not None,
        step=context.unit * (context.replicas if context.even else 1),
        largest=size,
    )
    todo = "set the nearest that can, CONFIG_TARGET_EFFECTIVE_BATCH=" + " or ".join(map(str, targets))
    if size < least:
        todo = f"with {size} samples set CONFIG_NORM_BATCH={max(1, min(target, size // context.replicas))}"
    elif not targets:
        todo = "no effective batch can be: use fewer devices, smaller batches or more training samples"
    raise PlanError(f"an effective batch of {target} cannot be planned", why=why, todo=todo)


def _attempt(
    context: SizingContext, target: int, split_share: Callable[[int], Split | None], *, impossible: str
) -> tuple[Split | None, str]:
    """Return the split of the largest share of `target`, or why there is none."""
    world, noun, norm_batch = context.replicas, context.replica_noun, context.norm_batch
    if why := _exceeds_data(context, target):
        return None, why
    if norm_batch and target % norm_batch:
        return None, f"it is not a multiple of CONFIG_NORM_BATCH={norm_batch}, which can be lowered, too"
    if target < world * context.unit:
        least = f"a group of CONFIG_NORM_BATCH={norm_batch} samples" if norm_batch else "a sample"
        return None, f"each of {world} {noun} needs at least {least}"
    sizes = rank_shares(target, world=world, unit=context.unit)
    if sizes[0] != sizes[-1] and (context.even or (context.why_one_shape and context.why_divisor_only)):
        padding = "" if context.even else f", and {context.why_divisor_only} allows no padding"
        return None, f"{world} {noun} cannot share it evenly{padding}"
    share = f"a device's share of it is {sizes[0]}" if world > 1 else f"it is {target}"
    return split_share(sizes[0]), f"{share}, but {impossible}"


def _check_data(context: SizingContext, split: Split, *, todo: str) -> None:
    effective = split.samples * context.replicas
    if why := _exceeds_data(context, effective):
        raise PlanError(f"an effective batch of {effective} cannot be planned", why=why, todo=todo)


def _exceeds_data(context: SizingContext, effective: int) -> str:
    size = context.facts.train_size
    return f"there are only {size} training samples" if size is not None and effective > size else ""


def _sizes(
    context: SizingContext, split: Split, effective: int | None = None, *, target: int | None = None, why: str
) -> Candidate:
    target = context.config.target if target is None else target
    effective = target if effective is None else effective
    ragged = split.last_micro_batch < split.micro_batch
    if ragged:  # the prediction raises where training fails with this size
        context.memory(split.last_micro_batch, accumulates=True)
    memory = context.memory(split.micro_batch, accumulates=split.accumulation > 1)
    last = "what remains; every sample weighs the same" if ragged else "all are of one size"
    if ragged and context.why_one_shape:
        last = f"what remains; {context.why_one_shape} gets {split.micro_batch} rows, the others of weight 0"
    elif context.why_one_shape and effective < split.samples * context.replicas:
        last = f"all are of one size; smaller shares are padded to it for {context.why_one_shape}"
    at_most = "at most " * (effective != split.samples * context.replicas)
    rows = split.rows(padded=bool(context.why_one_shape))
    shares = rank_shares(effective, world=context.replicas, unit=context.unit)
    reasons = {
        "micro_batch": why,
        "accumulation": f"{at_most}{split} = {split.samples} samples per device and optimizer step",
        "last_micro_batch": last,
        "effective_batch": why_effective(
            context.config, shares, rows=rows, noun=context.replica_noun, target=target
        ),
        "target": why_target(context.config),
        "norm_batch": why_norm_batch(context.config, context.facts),
        "memory": why_memory(memory, context.probed) + offload_note(context.config, context.placement),
    }
    return Candidate(
        context=context, split=split, effective=effective, target=target, memory=memory, reasons=reasons
    )
