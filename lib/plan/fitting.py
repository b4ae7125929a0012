"""The largest micro-batch that a device has memory for, by what a step is said to need. Pure."""

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
class Trial:
    """One way to make an optimizer step, as far as memory depends on it."""

    device: Kind
    several_devices: bool  # gradients are averaged over ranks
    micro_batch: int
    accumulates: bool  # there is more than one micro-batch
    norm_batch: int
    precision: Precision
    channels_last: bool
    compile: bool
    layout: Layout | None = None  # None: each process has everything


class NoRoomError(PlanError):
    """Not even `trial`, the smallest there is, fits: it needs `memory`."""

    def __init__(self, what: str, *, why: str, todo: str, trial: Trial, memory: Memory) -> None:
        super().__init__(what, why=why, todo=todo)
        self.trial, self.memory = trial, memory


class RefusedBatchError(PlanError):
    """The model itself refuses the micro-batch of a trial."""


def trial_of(plan: Plan) -> Trial:
    """How `plan` makes its steps."""
    return Trial(
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


# Among the parts of a prediction: what is no tensor, but lost between tensors in the allocator's segments.
GAPS = "gaps"
Parts: TypeAlias = Mapping[str, int]


class MemoryEstimator(Protocol):
    """The one step back up from planning: what an optimizer step takes is asked of the step itself.

    `train.planning.memory_estimate` implements it with the real optimizer step on simulated tensors.
    """

    def __call__(self, trial: Trial, /) -> Parts:
        """Return the bytes at the peak by what they are for, and GAPS if known.

        Raises RefusedBatchError where the model cannot take such a micro-batch.
        """


def predicted(trial: Trial, predict: MemoryEstimator, *, free_bytes: int) -> Memory:
    """What `trial` is predicted to need of a device with `free_bytes`."""
    parts = dict(predict(trial))
    gaps = parts.pop(GAPS, 0)
    peak = sum(parts.values())
    factor = PEAK_FACTOR * (COMPILED_PEAK_FACTOR if trial.compile else 1.0)
    # Main memory is shared with other programs, and what XLA keeps nobody has measured; a GPU has a context,
    # and libraries that want scratch.
    shared = trial.device not in OWN_MEMORY
    usable = round(free_bytes * FREE_MEMORY_MARGIN) if shared else free_bytes
    return Memory(
        parts=MappingProxyType(parts),
        reserve_bytes=round(peak * (factor - 1)) + (0 if shared else GPU_RESERVE_BYTES),
        usable_bytes=usable,
        gaps_bytes=gaps,
    )


def smallest_accepted(memory_of: Callable[[int], Memory], *, share: int, step: int) -> tuple[int, str]:
    """The first divisor of `share` from `step` on that the model accepts, and why not those before it.

    Its multiples are taken for accepted. Raises RefusedBatchError where the model accepts no divisor.
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


def largest_fitting(memory_of: Callable[[int], Memory], *, most: int, step: int = 1) -> int:
    """The largest multiple of `step` up to `most` samples that fits, or 0. Need grows with the batch.

    It is nearly a straight line: the line through two sizes says where to look next, and halving what
    is left keeps that from taking long where it is none. Small sizes come first: they are found sooner.
    """
    top = most // step
    below = memory_of(step) if top else None
    if below is None or not below.fits:
        return 0
    low, high = 1, top + 1  # the first fits; the second does not, or is none
    above, origin = None, (0, 0)  # need at `high` if it was looked at; the last size that was `low`
    slow = 0  # how many times on end the line has left more than half
    while high - low > 1:
        other, need = (high, above.need_bytes) if above is not None else origin
        per_size = (need - below.need_bytes) / (other - low)
        guess = (low + high) // 2
        if slow < 3:  # the first line, from nothing, falls short, and the second may by a little
            left = below.usable_bytes - below.need_bytes
            guess = low + int(left / per_size) if per_size * (high - low) > left else high - 1
        guess = min(max(guess, low + 1), high - 1)
        width, memory = high - low, memory_of(guess * step)
        if memory.fits:
            origin = (low, below.need_bytes)
            low, below = guess, memory
        else:
            high, above = guess, memory
        slow = slow + 1 if 2 * (high - low) > width else 0
    return low * step
