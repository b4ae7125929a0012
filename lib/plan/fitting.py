"""Search for the largest micro-batch that fits into a device's memory, by predicted peaks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeAlias

from lib.errors import PlanError
from lib.plan.batch import divisors
from lib.plan.tables import COMPILED_PEAK_FACTOR, FREE_MEMORY_MARGIN, GPU_RESERVE_BYTES, PEAK_FACTOR
from lib.plan.types import OWN_MEMORY, Kind, Layout, Memory, Plan, Precision


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
    """PlanError for a micro-batch that the model itself refuses."""


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


# Key of a prediction for bytes that are in no tensor but lost between tensors in the allocator's segments.
GAPS = "gaps"
Parts: TypeAlias = Mapping[str, int]


class MemoryEstimator(Protocol):
    """Memory prediction by the real optimizer step, which planning, being pure, gets passed in.

    `train.planning.memory_estimate` implements it with the optimizer step on simulated tensors.
    """

    def __call__(self, step: StepSettings, /) -> Parts:
        """Return bytes at the peak by category, and GAPS if known.

        Raises RefusedBatchError where the model cannot take such a micro-batch.
        """


def predicted(step: StepSettings, predict: MemoryEstimator, *, free_bytes: int) -> Memory:
    """Return the predicted need of `step` on a device with `free_bytes`, reserve included."""
    parts = dict(predict(step))
    gaps = parts.pop(GAPS, 0)
    peak = sum(parts.values())
    factor = PEAK_FACTOR * (COMPILED_PEAK_FACTOR if step.compile else 1.0)
    # Main memory is shared with other programs, and what XLA keeps has not been measured, hence the
    # margin. A GPU has a context instead, and libraries that need workspace.
    shared = step.device not in OWN_MEMORY
    usable = round(free_bytes * FREE_MEMORY_MARGIN) if shared else free_bytes
    return Memory(
        parts=MappingProxyType(parts),
        reserve_bytes=round(peak * (factor - 1)) + (0 if shared else GPU_RESERVE_BYTES),
        usable_bytes=usable,
        gaps_bytes=gaps,
    )


def smallest_accepted(memory_of: Callable[[int], Memory], *, share: int, step: int) -> tuple[int, str]:
    """Return the first divisor of `share`, from `step` on, that the model accepts, and why not less.

    Its multiples are assumed to be accepted. Raises RefusedBatchError where the model accepts no divisor.
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
        return size, f"; a multiple of {size}, for the model refuses {sizes} ({why})"
    raise RefusedBatchError(
        f"the model refuses micro-batches of {', '.join(map(str, refused))}", why=list(refused.values())[-1]
    )


def largest_fitting(memory_of: Callable[[int], Memory], *, limit: int, step: int = 1) -> int:
    """Return the largest multiple of `step` up to `limit` samples that fits, or 0. Need grows with the batch.

    The need is nearly linear in the batch: the line through two sizes gives the next guess, and bisection
    takes over where it is not. Small sizes come first, since they are predicted sooner.
    """
    top = limit // step
    below = memory_of(step) if top else None
    if below is None or not below.fits:
        return 0
    low, high = 1, top + 1  # the first fits; the second does not, or was never tried
    above, origin = None, (0, 0)  # need at `high` if predicted; the previous `low` and its need
    slow = 0  # guesses that left more than half of the interval
    while high - low > 1:
        other, need = (high, above.need_bytes) if above is not None else origin
        per_size = (need - below.need_bytes) / (other - low)
        guess = (low + high) // 2
        if slow < 3:  # the first guess, from one point, falls short, and the second may by a little
            left = below.usable_bytes - below.need_bytes
            guess = low + int(left / per_size) if per_size * (high - low) > left else high - 1
        guess = min(max(guess, low + 1), high - 1)
        width, memory = high - low, memory_of(guess * step)
        if memory.fits:
            origin = (low, below.need_bytes)
            low, below = guess, memory
        else:
            high, above = guess, memory
        slow += 2 * (high - low) > width
    return low * step
