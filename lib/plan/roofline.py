"""Roofline estimate of the time of an optimizer step on a GPU of the catalogue.

A step cannot be faster than its arithmetic at the rate of the matrix units, nor than its bytes at the memory
bandwidth (Williams, Waterman, Patterson 2009). Real programs reach a part of either rate, so the result is a
range. Work of the host, of the data pipeline and between devices is not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lib.plan.gpus import Gpu
from lib.plan.types import Precision
from lib.units import seconds_span

# Share of the peak that optimised training programs reach, from the rates that they publish: compiled GPT-2
# 29 % (modded-nanogpt, AdamW) to 41 % (llm.c) on H100, small ResNets on A100 25 to 37 % (cifar10-airbench).
# Convolutions at 224 pixels with real data reach less, 13 to 20 % (ffcv, timm): there it is a floor.
FLOP_SHARES = (0.25, 0.40)

# Large copies within a GPU reach 90 % of the memory bandwidth (measured on H100 and H200). The lower end is
# an assumption: training kernels mix long reads with short ones.
BANDWIDTH_SHARES = (0.6, 0.9)

SHORT_SECONDS = 5e-3  # hundreds of kernels at some ten microseconds each


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of one device in one optimizer step.

    flop:             operations of all its micro-batches, forward and backward.
    activation_bytes: activations that all its micro-batches together keep for backward.
    optimizer_bytes:  optimizer state, without weights and gradients.
    frozen_bytes:     weights that are not trained.
    """

    flop: float
    accumulation: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    frozen_bytes: int = 0

    @property
    def least_bytes_moved(self) -> int:
        """Lower bound of the bytes read and written, where no cache holds the model.

        Each micro-batch reads the weights twice (forward, backward) and adds to the gradients (the first one
        only writes them); the update reads gradients, and reads and writes weights and state. What is kept
        for backward is written and read once. Other reads and writes of layers are not counted.
        """
        weights = (2 * self.accumulation + 2) * self.weight_bytes + 2 * self.accumulation * self.frozen_bytes
        gradients = 2 * self.accumulation * self.gradient_bytes
        return weights + gradients + 2 * self.optimizer_bytes + 2 * self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Estimated seconds of one optimizer step, and their bound."""

    fastest_seconds: float
    slowest_seconds: float
    bound: Literal["arithmetic", "memory", "arithmetic or memory"]
    reason: str

    def __str__(self) -> str:
        if self.slowest_seconds < SHORT_SECONDS:
            return f"estimate: {self.span} an optimizer step, so that launching its kernels decides"
        return f"estimate: {self.span} an optimizer step, bounded by {self.bound} ({self.reason})"

    @property
    def span(self) -> str:
        """The range in words, from the fastest to the slowest."""
        return seconds_span(self.fastest_seconds, self.slowest_seconds, least=SHORT_SECONDS)


def estimate_step_time(work: StepWork, gpu: Gpu, *, precision: Precision) -> StepTime:
    """Estimate the range of a step's time on `gpu`, by the larger of its two bounds."""
    peak = peak_flop_per_second(gpu, precision=precision)
    bandwidth = gpu.bandwidth_bytes_per_second
    moved = work.least_bytes_moved
    slow, fast = (
        (work.flop / (peak * flop_share), moved / (bandwidth * bandwidth_share))
        for flop_share, bandwidth_share in zip(FLOP_SHARES, BANDWIDTH_SHARES, strict=True)
    )
    low, high = (f"{share:.0%}" for share in FLOP_SHARES)
    units = precision if _has_units(gpu, precision) else f"fp32 (no units for {precision})"
    computed = f"{work.flop / 1e12:.3g} TFLOP at {low} to {high} of {peak / 1e12:.4g} TFLOP/s in {units}"
    low, high = (f"{share:.0%}" for share in BANDWIDTH_SHARES)
    carried = f"at least {moved / 1e9:.3g} GB at {low} to {high} of {bandwidth / 1e9:.0f} GB/s"
    bound: Literal["arithmetic", "memory", "arithmetic or memory"]
    match (fast[1] > fast[0], slow[1] > slow[0]):
        case True, True:
            bound, reason = "memory", carried
        case False, False:
            bound, reason = "arithmetic", computed
        case _:  # near the ridge the bound depends on the shares reached
            bound, reason = "arithmetic or memory", f"{computed}; {carried}"
    return StepTime(fastest_seconds=max(fast), slowest_seconds=max(slow), bound=bound, reason=reason)


def step_seconds(
    trained: StepWork,
    frozen: Sequence[tuple[float, int]],
    *,
    concurrent: bool,
    gpu: Gpu,
    precision: Precision,
) -> tuple[float, float]:
    """Return the range, in seconds, of a step of a trained model and frozen ones.

    trained:    work of the trained model, with the activations of the device.
    frozen:     operations per step and bytes of weights of each frozen model.
    concurrent: each frozen model has its own device, and the slowest one counts, after the trained model;
        else one device does it all.
    """

    def span(work: StepWork) -> tuple[float, float]:
        time = estimate_step_time(work, gpu, precision=precision)
        return time.fastest_seconds, time.slowest_seconds

    if not concurrent:
        flop = trained.flop + sum(flop for flop, _ in frozen)
        return span(replace(trained, flop=flop, frozen_bytes=sum(weight_bytes for _, weight_bytes in frozen)))
    alone = replace(trained, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0)
    branches = [span(replace(alone, flop=flop, frozen_bytes=weight_bytes)) for flop, weight_bytes in frozen]
    before, (fastest, slowest) = span(replace(trained, activation_bytes=0)), zip(*branches, strict=True)
    return before[0] + max(fastest), before[1] + max(slowest)


def peak_flop_per_second(gpu: Gpu, *, precision: Precision) -> float:
    """Return the peak of matrix products in `precision`; that of fp32 where the GPU has no units for it."""
    if precision == "fp32" or not _has_units(gpu, precision):
        return gpu.fp32_flop_per_second
    assert gpu.half_flop_per_second is not None, f"{gpu.key} has units without a rate"
    return gpu.half_flop_per_second


def _has_units(gpu: Gpu, precision: Precision) -> bool:
    return precision == "fp32" or precision in gpu.formats
