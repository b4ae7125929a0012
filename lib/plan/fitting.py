"""The largest micro-batch that a device has memory for, by what a step is said to need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from lib.plan.types import Kind, Memory, Precision
from lib.tables import (
    COMPILED_PEAK_FACTOR,
    FREE_MEMORY_MARGIN,
    GPU_RESERVE_BYTES,
    PEAK_FACTOR,
)


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


Parts: TypeAlias = Mapping[str, int]
Predict: TypeAlias = Callable[[Trial], Parts]  # bytes at the peak, by what they are for


def predicted(trial: Trial, predict: Predict, *, free_bytes: int) -> Memory:
    """What `trial` is predicted to need of a device with `free_bytes`."""
    parts = predict(trial)
    peak = sum(parts.values())
    factor = PEAK_FACTOR * (COMPILED_PEAK_FACTOR if trial.compile else 1.0)
    # Main memory is shared with other programs; a GPU has a context, and libraries that want scratch.
    shared = trial.device in ("cpu", "mps")
    usable = round(free_bytes * FREE_MEMORY_MARGIN) if shared else free_bytes
    return Memory(
        parts=MappingProxyType(dict(parts)),
        reserve_bytes=round(peak * (factor - 1)) + (0 if shared else GPU_RESERVE_BYTES),
        usable_bytes=usable,
        method="predict",
    )


def largest_fitting(memory_of: Callable[[int], Memory], *, most: int, step: int = 1) -> int:
    """The largest multiple of `step` up to `most` samples that fits, or 0. Need grows with the batch.

    A prediction costs the same at any size, and need is nearly a straight line: the line through the
    two ends says where to look next, and bisection keeps that from taking long where it is none.
    """
    high = most // step
    if not high:
        return 0
    above = memory_of(high * step)
    if above.fits:
        return high * step
    low, below, halve = 0, None, False
    while high - low > 1:
        guess = (low + high) // 2
        if not halve:
            # Before anything fits, a line through nothing at all: too low, if there are parameters.
            need_low = below.need_bytes if below is not None else 0
            per_step = (above.need_bytes - need_low) / (high - low)
            guess = low + int((above.usable_bytes - need_low) / per_step) if per_step > 0 else guess
            guess = min(max(guess, low + 1), high - 1)
        width, memory = high - low, memory_of(guess * step)
        if memory.fits:
            low, below = guess, memory
        else:
            high, above = guess, memory
        # One more step beyond a fit is what ends the search where the line is right.
        halve = not halve and 2 * (high - low) > width and below is not memory
    return low * step
