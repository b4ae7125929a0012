"""Micro-batches: the largest that fits into a device's memory by predicted peaks, and the split of a share.

A share is what one device has of the effective batch; here it is the largest (`lib.plan.types.rank_shares`).
Its split is in integers only: the sizes add up to it exactly, or there is no split. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from math import isqrt
from typing import Any, Protocol, TypeAlias

from lib.errors import PlanError
from lib.plan.tables import COMPILED_PEAK_FACTOR, FREE_MEMORY_MARGIN, GPU_RESERVE_BYTES, PEAK_FACTOR
from lib.plan.types import OWN_MEMORY, Decision, Kind, Layout, Memory, Plan, Precision, fixed_plan

TURNS_PER_STAGE = 4  # stages of a pipeline then wait for less than a fifth of a step
LARGEST_TARGET = 1_048_576  # upper end of the range of CONFIG_TARGET_EFFECTIVE_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Execution of an optimizer step: all that its memory depends on."""

    device: Kind
    several_devices: bool  # gradients are averaged over ranks
    micro_batch: int = 1
    accumulates: bool = False  # there is more than one micro-batch
    norm_batch: int
    precision: Precision
    channels_last: bool
    compile: bool
    layout: Layout | None = None  # None: each process holds all state


class NoRoomError(PlanError):
    """PlanError for a model that does not fit even with the smallest micro-batch: `step` needs `memory`."""

    def __init__(self, what: str, *, why: str, todo: str, step: StepSettings, memory: Memory) -> None:
        super().__init__(what, why=why, todo=todo)
        self.step, self.memory = step, memory


class RefusedBatchError(PlanError):
    """PlanError for a micro-batch with which the code of the model or task fails."""


def step_settings(plan: Plan) -> StepSettings:
    """Return the settings of the steps of `plan`."""
    return StepSettings(
        device=plan.device,
        several_devices=plan.world > 1,
        micro_batch=plan.micro_batch,
        accumulates=plan.accumulation > 1,
        norm_batch=plan.norm_batch,
        precision=plan.precision,
        channels_last=plan.channels_last,
        compile=plan.compile,
        layout=plan.layout,
    )


def plan_of(step: StepSettings) -> Plan:
    """Return a plan of such steps with the fewest micro-batches.

    A third one would reuse the memory of the second.
    """
    own: dict[str, Any] = {}
    if step.layout is not None and step.layout.replica.strategy != "single":
        own = {"strategy": step.layout.strategy, "branch_devices": step.layout.branch_devices}
    return fixed_plan(
        "estimated",
        device=step.device,
        world=1 + step.several_devices,
        micro_batch=step.micro_batch,
        accumulation=1 + step.accumulates,
        norm_batch=step.norm_batch,
        precision=step.precision,
        channels_last=step.channels_last,
        compile=step.compile,  # MemoryTraces asks for steps that are not, and the planner adds a share
        **own,
    )


# Keys of a prediction for work: FLOP and launches of kernels of a micro-batch, launches of the update, and
# bytes that a micro-batch copies to main memory and back.
WORK = (
    "FLOP of a micro-batch",
    "launches of a micro-batch",
    "launches of the update",
    "copies of a micro-batch",
)
# Key of a prediction for bytes that are in no tensor but lost between tensors in the allocator's segments.
GAPS = "gaps"
Parts: TypeAlias = Mapping[str, int]


class MemoryEstimator(Protocol):
    """Memory prediction by the real optimizer step, which planning, being pure, gets passed in.

    `train.planning.memory_estimate` implements it with the optimizer step on simulated tensors.
    """

    def __call__(self, step: StepSettings, /) -> Parts:
        """Return bytes at the peak by category, and GAPS and WORK if known.

        Raises RefusedBatchError where the model cannot take such a micro-batch.
        """


def predicted(step: StepSettings, predict: MemoryEstimator, *, free_bytes: int) -> Memory:
    """Return the predicted need of `step` on a device with `free_bytes`, reserve included."""
    parts = {name: size for name, size in predict(step).items() if name not in WORK}
    gaps = parts.pop(GAPS, 0)
    peak = sum(parts.values())
    factor = PEAK_FACTOR * (COMPILED_PEAK_FACTOR if step.compile else 1.0)
    # Main memory is shared with other programs, and what a compiler of whole steps keeps has not been
    # measured, hence the margin. A GPU has a context instead, and libraries that need workspace.
    shared = step.device not in OWN_MEMORY
    usable = round(free_bytes * FREE_MEMORY_MARGIN) if shared else free_bytes
    return Memory(
        parts=parts,
        reserve_bytes=round(peak * (factor - 1)) + (0 if shared else GPU_RESERVE_BYTES),
        usable_bytes=usable,
        gaps_bytes=gaps,
    )


def enough_turns(bound: Decision[int], layout: Layout, *, share: int) -> Decision[int]:
    """Lower the bound of a micro-batch of a pipeline until its stages are busy for most of a step."""
    most = max(1, share // (TURNS_PER_STAGE * layout.shard))
    if layout.strategy != "pipeline" or most >= bound.value:
        return bound
    why = f"{TURNS_PER_STAGE} micro-batches per stage keep the stages busy; {bound.reason}"
    return Decision(most, why)


def smallest_accepted(memory_of: Callable[[int], Memory], *, share: int, step: int) -> tuple[int, str]:
    """Return the first divisor of `share`, from `step` on, that training accepts, and why not less.

    Its multiples are assumed to be accepted. Raises RefusedBatchError where it accepts no divisor.
    """
    refused: dict[int, str] = {}
    for size in (step * divisor for divisor in divisors(max(1, share // step))):
        try:
            memory_of(size)
        except RefusedBatchError as error:
            refused[size] = error.why
            continue
        if not refused:
            return size, ""
        sizes, why = ", ".join(map(str, refused)), next(iter(refused.values()))
        return size, f"; a multiple of {size}, as training fails with {sizes} ({why})"
    raise RefusedBatchError(
        f"training fails with micro-batches of {', '.join(map(str, refused))}", why=list(refused.values())[-1]
    )


def sizes_to_try(
    share: int, *, limit: int, step: int, prefers_divisor: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the divisors of `share`, and of which sizes the largest that fits is searched; up to `limit`.

    All are multiples of `step`. The second are the divisors alone where one of them will be chosen anyway,
    because none is more than twice the one before: each size that is tried takes a trace.
    """
    exact = [step * divisor for divisor in divisors(share // step) if step * divisor <= limit]
    close = all(larger <= 2 * smaller for smaller, larger in pairwise([*exact, limit]))
    return exact, exact if prefers_divisor and close else range(step, limit + 1, step)


def largest_fitting(
    memory_of: Callable[[int], Memory],
    sizes: Sequence[int],
    *,
    first: Sequence[int] = (),
    at_once: bool = False,
) -> int:
    """Return the largest of `sizes` that fits, or 0. Need grows with the batch; both sequences ascend.

    The need is nearly linear in the batch: the line through two sizes gives the next guess, and bisection
    takes over where it is not. Small sizes come first, since they are predicted sooner.

    first: sizes among them that are tried before those between them, such as others will ask for, too.
    at_once: the last is a whole step, which keeps no gradients between micro-batches and may need less.
    """
    if not sizes:
        return 0
    if not (below := memory_of(sizes[0])).fits:
        without = below.need_bytes - 1.1 * below.parts.get("gradients", 0)  # and their part of the reserve
        at_once = at_once and len(sizes) > 1 and without <= below.usable_bytes  # else it takes no trace
        return sizes[-1] if at_once and memory_of(sizes[-1]).fits else 0
    low, high = sizes[0], sizes[-1] + 1  # the one fits; the other does not, or is beyond
    # Need at `high` if predicted; the previous size that fitted and its need, at first of no samples.
    above, origin = None, (0, below.need_bytes - below.parts.get("activations", below.need_bytes))
    for grid in (first, sizes):
        inside = grid[bisect_right(grid, low) : bisect_left(grid, high)]
        slow = 0  # guesses that left more than half of the sizes inside
        while inside:
            other, need = (high, above.need_bytes) if above is not None else origin
            per_sample = (need - below.need_bytes) / (other - low)
            left, place = below.usable_bytes - below.need_bytes, len(inside) // 2
            if slow < 3:  # the first guess, from one point, falls short, and the second may by a little
                within = per_sample * (inside[-1] - low) > left
                place = bisect_right(inside, low + left / per_sample) - 1 if within else len(inside) - 1
            place = max(place, 0)
            guess, count = inside[place], len(inside) + 1
            memory = memory_of(guess)
            if memory.fits:
                origin, below = (low, below.need_bytes), memory
                low, inside = guess, inside[place + 1 :]
            else:
                high, above, inside = guess, memory, inside[:place]
            slow += 2 * (len(inside) + 1) > count
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`accumulation` micro-batches: all of `micro_batch` samples except the last, of `last_micro_batch`."""

    micro_batch: int
    accumulation: int
    last_micro_batch: int

    @property
    def samples(self) -> int:
        """Samples per device and optimizer step."""
        return self.micro_batch * (self.accumulation - 1) + self.last_micro_batch

    def rows(self, *, padded: bool) -> int:
        """Return the rows of all micro-batches. padded: the last one is as large as the others."""
        return self.micro_batch * self.accumulation if padded else self.samples

    def __str__(self) -> str:
        ragged = self.last_micro_batch < self.micro_batch
        return f"{self.accumulation - ragged} x {self.micro_batch}" + f" + {self.last_micro_batch}" * ragged

    def most_of(self, devices: int) -> int:
        """Return the samples of the fullest of `devices` that divide each micro-batch."""
        full, last = -(-self.micro_batch // devices), -(-self.last_micro_batch // devices)
        return full * (self.accumulation - 1) + last

    @classmethod
    def of(cls, per_device: int, *, micro_batch: int) -> Split:
        """Split `per_device` samples into micro-batches of `micro_batch` and a remainder."""
        full, rest = divmod(per_device, micro_batch)
        return cls(
            micro_batch=micro_batch, accumulation=full + bool(rest), last_micro_batch=rest or micro_batch
        )


def largest_micro_batch(per_device: int, *, bound: int, step: int, divisor_only: bool) -> int | None:
    """Return the micro-batch to use, in samples; None where no good split exists.

    A divisor if one is at least 80 % of what fits, else what fits, with a smaller last micro-batch. With
    `divisor_only` always a divisor, or None if the best one leaves more than half of what fits unused. Needs
    1 <= bound and step <= bound.
    """
    step = step or 1
    if per_device % step:
        return None
    fits = min(bound, per_device)
    ascending = divisors(per_device // step)
    divisor = step * ascending[bisect_right(ascending, fits // step) - 1]
    if divisor_only:
        return divisor if 2 * divisor >= fits else None
    return divisor if 5 * divisor >= 4 * fits else fits - fits % step


def split_under(per_device: int, *, bound: int, step: int = 0, divisor_only: bool = False) -> Split | None:
    """Split the share into micro-batches of at most `bound` samples, multiples of `step` (0: of any size)."""
    micro_batch = largest_micro_batch(per_device, bound=bound, step=step, divisor_only=divisor_only)
    return None if micro_batch is None else Split.of(per_device, micro_batch=micro_batch)


def split_evenly(per_device: int, *, bound: int, step: int = 1) -> Split:
    """Split the share into as few micro-batches as possible, of about one size.

    bound: the most that fits. The share is a multiple of `step`, as is each size.
    """
    accumulation = -(-per_device // (bound - bound % step))
    micro_batch = -(-per_device // (accumulation * step)) * step
    last = per_device - micro_batch * (accumulation - 1)
    return Split(micro_batch=micro_batch, accumulation=accumulation, last_micro_batch=last)


def split_by(per_device: int, *, micro_batch: int, divisor_only: bool = False) -> Split | None:
    """Split the share into micro-batches of a size set by hand; None where that is impossible."""
    if micro_batch > per_device or (divisor_only and per_device % micro_batch):
        return None
    return Split.of(per_device, micro_batch=micro_batch)


def nearest_targets(
    target: int, *, works: Callable[[int], bool], step: int = 1, largest: int = LARGEST_TARGET
) -> tuple[int, ...]:
    """Return the nearest effective batch below `target` and the nearest above it that can be planned.

    works: predicate, true if an effective batch can be split. step: they are multiples of it. Fewer than two
    are returned where one side has none between 1 and `largest`.
    """
    top = min(largest, LARGEST_TARGET) // step
    below = filter(works, range(min((target - 1) // step, top) * step, 0, -step))
    above = filter(works, range((target // step + 1) * step, top * step + 1, step))
    return tuple(each for side in (below, above) for each in islice(side, 1))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of `number` in ascending order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))


# LatentWire's rule for batches that follow the memory, as advice only: a run never changes
# its own micro-batch by it, and the effective batch stays the same.
TARGET_UTIL = 0.75  # share of the memory, where CONFIG_ELASTIC_TARGET_UTIL is not set
TOO_FULL, FULL = 0.90, 0.80  # shares of the memory in use at the peak
HALF, LESS, MORE = 0.5, 0.75, 1.2  # factors on the micro-batch
NEAR, ROOMY = 0.15, 0.60  # the batch grows below target - NEAR and below ROOMY


def advised_micro_batch(
    micro_batch: int, *, share: int, norm_batch: int, filled: float, target: float = TARGET_UTIL
) -> int:
    """Return `micro_batch`, or the divisor of `share` and multiple of NORM_BATCH to start with instead.

    share: samples per device and optimizer step. norm_batch: 0 for none. filled: share of the device's memory
    in use at the peak. target: share of it to use. Memory grows by less than the micro-batch does, so that a
    batch scaled in proportion to `target` fits.
    """
    if filled > FULL:
        limit = micro_batch * (HALF if filled > TOO_FULL else LESS)
    elif filled < min(target - NEAR, ROOMY):
        limit = micro_batch * max(MORE, target / filled)
    else:
        return micro_batch
    sizes = [size for size in divisors(share) if size <= limit and size % max(1, norm_batch) == 0]
    if filled <= FULL:
        sizes = [size for size in sizes if size > micro_batch]
    return max(sizes, default=micro_batch)
