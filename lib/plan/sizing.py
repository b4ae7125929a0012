"""Batch sizes of a run: the split of its effective batch over devices and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lib.errors import PlanError
from lib.plan.asked import Asked, Decision
from lib.plan.batch import LARGEST_TARGET, Split, nearest_targets, split_by, split_under
from lib.plan.bound import cpu_table_batch, raise_to_norm_batch, table_bound
from lib.plan.fitting import (
    MemoryEstimator,
    NoRoomError,
    Trial,
    largest_fitting,
    predicted,
    smallest_accepted,
)
from lib.plan.placement import Placement
from lib.plan.probing import NEAR_BEST, Probed
from lib.plan.reasons import offload_note, told, ways_to_fit, why_memory, why_norm_batch, why_target
from lib.plan.types import ON_XLA, Layout, Memory, ModelFacts, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of an optimizer step on each device, with reasons by the names of the plan's fields."""

    split: Split
    target: int
    norm_batch: int
    memory: Memory | None
    reasons: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Execution mode: how a step is computed, whatever its size."""

    compile: bool
    precision: Precision
    channels_last: bool
    even: bool  # the caller cannot run a smaller last micro-batch
    predict: MemoryEstimator | None
    probed: Probed | None  # probe runs on this hardware
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Sizing context: the input of every method that chooses sizes."""

    config: Asked
    facts: ModelFacts
    placement: Placement
    way: Way
    norm_batch: int

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.placement.world.value

    @property
    def sharers(self) -> str:
        """The unit that gets a share of the batch, for messages."""
        return "devices" if self.way.layout.devices_per_process == 1 else "pairs of devices"

    @property
    def on_xla(self) -> bool:
        """True if the devices are XLA devices or TPUs."""
        return self.placement.device.value in ON_XLA

    @property
    def divisor_only(self) -> bool:
        """True if all micro-batches must be of one size."""
        return self.way.compile or self.on_xla or self.facts.has_batchnorm or self.way.even

    @property
    def why_divisor_only(self) -> str:
        """The reason for `divisor_only`, for messages."""
        if self.facts.has_batchnorm:
            return "batch normalisation"
        if self.on_xla:
            return "XLA"
        return "torch.compile" if self.way.compile else "this caller"

    def memory(self, micro_batch: int, *, accumulates: bool) -> Memory | None:
        """Predict the memory of a micro-batch; None without a predictor."""
        if self.way.predict is None:
            return None
        trial = self.trial(micro_batch, accumulates=accumulates)
        return predicted(trial, self.way.predict, free_bytes=self.placement.free_bytes)

    def trial(self, micro_batch: int, *, accumulates: bool) -> Trial:
        """Return the Trial of a micro-batch in this context."""
        return Trial(
            device=self.placement.device.value,
            several_devices=self.world > 1,
            micro_batch=micro_batch,
            accumulates=accumulates,
            norm_batch=self.norm_batch,
            precision=self.way.precision,
            channels_last=self.way.channels_last,
            compile=self.way.compile,
            layout=self.way.layout,
        )


def choose_sizes(config: Asked, facts: ModelFacts, placement: Placement, way: Way) -> Sizes:
    """Choose micro-batch, accumulation and effective batch.

    Raises PlanError where there is no target, and, with the nearest possible ones, where it cannot be kept.
    """
    by_hand = config.hyper_param == "manual"
    if not config.target and not (by_hand and config.gradient_accumulation):
        raise PlanError(
            "CONFIG_TARGET_EFFECTIVE_BATCH=0 leaves the effective batch open",
            why=f"models/{config.model}/Kconfig gives no RECOMMENDED_TARGET",
            todo="set CONFIG_TARGET_EFFECTIVE_BATCH",
        )
    norm_batch = (config.norm_batch or 0) if facts.has_batchnorm else 0
    situation = Situation(config=config, facts=facts, placement=placement, way=way, norm_batch=norm_batch)
    if by_hand:
        return _manual(situation)
    return _strict(situation) if config.batch_table_strict else _automatic(situation)


def _automatic(situation: Situation) -> Sizes:
    if situation.way.probed is not None:
        return _measured(situation, situation.way.probed)
    if situation.config.auto_method == "table":
        bound = table_bound(situation.config, situation.placement, compiled=situation.way.compile)
        step = situation.norm_batch
        bound = raise_to_norm_batch(bound, situation.placement, situation.facts, norm_batch=step)
    else:
        bound, step = _predicted_bound(situation)

    def cut(per_device: int) -> Split | None:
        return split_under(per_device, bound=bound.value, step=step, divisor_only=situation.divisor_only)

    why_not = (
        f"{situation.why_divisor_only} needs micro-batches of one size, and no divisor of it "
        f"uses half of what fits ({bound.reason})"
    )
    split = _cut_target(situation, cut, why_not=why_not)
    micro_batch = f"{bound.reason}{_fitting(situation, split, bound=bound.value)}"
    return _sizes(situation, split, target=situation.config.target, why_micro_batch=micro_batch)


def _measured(situation: Situation, probed: Probed) -> Sizes:
    """Return sizes for the best measured micro-batch, which was chosen among those that split the target."""
    chosen = probed.chosen

    def cut(per_device: int) -> Split | None:
        return split_by(per_device, micro_batch=chosen.micro_batch, divisor_only=situation.divisor_only)

    split = _cut_target(situation, cut, why_not="it was measured for another one")
    rates = ", ".join(
        f"{found.samples_per_second:.4g} at {found.micro_batch}" for found in probed.measurements
    )
    micro_batch = f"measured: samples/s {rates}; the smallest within {NEAR_BEST:.0%} of the best"
    return _sizes(situation, split, target=situation.config.target, why_micro_batch=micro_batch)


def _predicted_bound(situation: Situation) -> tuple[Decision[int], int]:
    """Return the largest micro-batch predicted to fit, and what it must be a multiple of.

    Raises PlanError, with figures, where none fits.
    """
    if situation.way.predict is None:
        raise PlanError(
            "there is no model to predict the memory of",
            why=f"{situation.config.model} is known by name only",
            todo="set CONFIG_AUTO_METHOD_TABLE=y",
        )
    share, step = max(1, situation.config.target // situation.world), situation.norm_batch or 1

    def memory_of(micro_batch: int) -> Memory:
        memory = situation.memory(micro_batch, accumulates=micro_batch < share)
        assert memory is not None
        return memory

    step, refusal = smallest_accepted(memory_of, share=share, step=step)
    most, enough = share, ", the whole share of a device"
    scale = situation.config.table_scale
    if situation.placement.device.value == "cpu" and scale is not None:
        # On a CPU caches, not memory, decide the speed: ResNets were slower with all that fits.
        most, enough = min(share, cpu_table_batch(scale=scale)), ", and more is no faster on a processor"
    # A share that is no multiple of NORM_BATCH is refused later, with suggestions.
    most = max(step, most - most % step)
    bound = largest_fitting(memory_of, most=most, step=step)
    if not bound:
        memory, trial = memory_of(step), situation.trial(step, accumulates=step < share)
        raise NoRoomError(
            f"{situation.config.model} does not fit on {situation.placement.name}",
            why=f"a micro-batch of {step} is predicted to need {told(memory)}",
            todo=ways_to_fit(
                situation.config,
                situation.placement,
                memory,
                norm_batch=situation.norm_batch,
                precision=situation.way.precision,
            ),
            trial=trial,
            memory=memory,
        )
    fit = f"{bound} fit{enough if bound == most else ''}: predicted to need {told(memory_of(bound))}"
    unmeasured = (
        "nothing was measured here yet (make probe); " if situation.config.auto_method == "probe" else ""
    )
    return Decision(bound, unmeasured + fit + refusal), step


def _strict(situation: Situation) -> Sizes:
    bound = table_bound(situation.config, situation.placement, compiled=situation.way.compile)
    batch, target = bound.value, situation.config.target
    if situation.norm_batch and batch % situation.norm_batch:
        raise PlanError(
            f"CONFIG_BATCH_TABLE_STRICT=y gives micro-batches of {batch}, "
            f"no multiple of CONFIG_NORM_BATCH={situation.norm_batch}",
            why=bound.reason,
            todo="set CONFIG_NORM_BATCH=0 (not portable), or CONFIG_BATCH_TABLE_STRICT=n",
        )
    split = Split.of(batch * max(1, target // (batch * situation.world)), micro_batch=batch)
    _check_data(situation, split.samples * situation.world, todo="set CONFIG_BATCH_TABLE_STRICT=n")
    return _sizes(situation, split, target=target, why_micro_batch=f"{bound.reason}, as it is")


def _manual(situation: Situation) -> Sizes:
    batch, accumulation = situation.config.batch_size, situation.config.gradient_accumulation
    if batch is None:
        raise PlanError("CONFIG_HYPER_PARAM_MANUAL=y without a batch size", todo="set CONFIG_BATCH_SIZE")
    if situation.norm_batch and batch % situation.norm_batch:
        multiple = -(-batch // situation.norm_batch) * situation.norm_batch
        raise PlanError(
            f"CONFIG_BATCH_SIZE={batch} is no multiple of CONFIG_NORM_BATCH={situation.norm_batch}",
            todo=f"set it to {multiple}, or CONFIG_NORM_BATCH to "
            f"a divisor of {batch}, or to 0 for plain batch normalisation, which is not portable",
        )
    why_micro_batch = f"CONFIG_BATCH_SIZE={batch}, set by hand"
    if accumulation:
        split = Split.of(batch * accumulation, micro_batch=batch)
        _check_manual_product(situation, split)
        return _sizes(
            situation, split, target=split.samples * situation.world, why_micro_batch=why_micro_batch
        )

    def cut(per_device: int) -> Split | None:
        return split_by(per_device, micro_batch=batch, divisor_only=situation.divisor_only)

    why_not = f"CONFIG_BATCH_SIZE={batch} is more than that"
    if batch * situation.world <= situation.config.target:
        why_not = (
            f"CONFIG_BATCH_SIZE={batch} does not divide it, and {situation.why_divisor_only} "
            "needs micro-batches of one size"
        )
    split = _cut_target(situation, cut, why_not=why_not)
    return _sizes(situation, split, target=situation.config.target, why_micro_batch=why_micro_batch)


def _check_manual_product(situation: Situation, split: Split) -> None:
    world, target = situation.world, situation.config.target_effective_batch
    effective = split.samples * world
    if target and target != effective:
        raise PlanError(
            f"CONFIG_TARGET_EFFECTIVE_BATCH={target} contradicts CONFIG_BATCH_SIZE={split.micro_batch} x "
            f"CONFIG_GRADIENT_ACCUMULATION={split.accumulation} x {world} device(s) = {effective}",
            todo="make them agree, or set CONFIG_GRADIENT_ACCUMULATION or CONFIG_TARGET_EFFECTIVE_BATCH to 0",
        )
    _check_data(situation, effective, todo="lower CONFIG_GRADIENT_ACCUMULATION or CONFIG_BATCH_SIZE")


def _cut_target(situation: Situation, cut: Callable[[int], Split | None], *, why_not: str) -> Split:
    """Split the target. Raises PlanError with the nearest targets that can be split."""

    def works(per_device: int) -> bool:
        return cut(per_device) is not None

    world, norm_batch, target = situation.world, situation.norm_batch, situation.config.target
    per_device, rest = divmod(target, world)
    share = f"a device's share of it is {per_device}" if world > 1 else f"it is {per_device}"
    split = None
    if _exceeds_data(situation, target):
        why = f"there are only {situation.facts.train_size} training samples"
    elif rest:
        why = f"it cannot be shared by {world} {situation.sharers} evenly"
    elif norm_batch and per_device < norm_batch:
        why = f"{share}, less than CONFIG_NORM_BATCH={norm_batch}"
    elif norm_batch and per_device % norm_batch:
        why = f"{share}, no multiple of CONFIG_NORM_BATCH={norm_batch}"
    else:
        split, why = cut(per_device), f"{share}, but {why_not}"
    if split is None:
        raise PlanError(_cannot(target), why=why, todo=_offers(situation, target, works=works))
    return split


def _check_data(situation: Situation, effective: int, *, todo: str) -> None:
    if _exceeds_data(situation, effective):
        why = f"there are only {situation.facts.train_size} training samples"
        raise PlanError(_cannot(effective), why=why, todo=todo)


def _exceeds_data(situation: Situation, effective: int) -> bool:
    return situation.facts.train_size is not None and effective > situation.facts.train_size


def _cannot(effective: int) -> str:
    return f"an effective batch of {effective} cannot be planned"


def _offers(situation: Situation, target: int, *, works: Callable[[int], bool]) -> str:
    size = situation.facts.train_size
    largest = LARGEST_TARGET if size is None else size
    offers = nearest_targets(target, world=situation.world, works=works, largest=largest)
    if not offers:
        return "no effective batch can be: use fewer devices, smaller batches or more training samples"
    return "the nearest that can: CONFIG_TARGET_EFFECTIVE_BATCH=" + " or ".join(map(str, offers))


def _fitting(situation: Situation, split: Split, *, bound: int) -> str:
    per_device = situation.config.target // situation.world
    micro_batch, norm_batch = split.micro_batch, situation.norm_batch
    if split.last_micro_batch < micro_batch:
        return f"; no divisor of {per_device} comes near, so the last micro-batch is smaller"
    if micro_batch == per_device < bound:
        return f"; the whole share of a device is {per_device}"
    if micro_batch < bound:
        multiple = f" and multiple of NORM_BATCH = {norm_batch}" if norm_batch else ""
        return f"; the largest divisor of {per_device}{multiple} is {micro_batch}"
    return f", a divisor of {per_device}"


def _sizes(situation: Situation, split: Split, *, target: int, why_micro_batch: str) -> Sizes:
    effective = split.samples * situation.world
    ragged = split.last_micro_batch < split.micro_batch
    full = split.accumulation - ragged
    cut = f"{full} x {split.micro_batch}" + (f" + {split.last_micro_batch}" if ragged else "")
    missed = (
        "as asked" if effective == target else f"MISSES the target of {target} by {effective - target:+d}"
    )
    sharers = "device(s)" if situation.sharers == "devices" else "pair(s) of devices"
    reasons = {
        "micro_batch": why_micro_batch,
        "accumulation": f"{cut} = {split.samples} samples per device and optimizer step",
        "last_micro_batch": "what remains; every sample weighs the same" if ragged else "all are of one size",
        "effective_batch": f"{split.samples} on each of {situation.world} {sharers}, {missed}",
        "target": why_target(situation.config),
        "norm_batch": why_norm_batch(situation.config, situation.facts),
    }
    if ragged:  # the prediction raises where the model refuses this size
        situation.memory(split.last_micro_batch, accumulates=True)
    memory = situation.memory(split.micro_batch, accumulates=split.accumulation > 1)
    told_memory = why_memory(memory, situation.way.probed)
    reasons["memory"] = told_memory + offload_note(situation.config, situation.placement)
    return Sizes(split=split, target=target, norm_batch=situation.norm_batch, memory=memory, reasons=reasons)
