"""Roofline estimate of the time of an optimizer step on a GPU of the catalogue.

A step cannot be faster than its arithmetic at the rate of the matrix units, nor than its bytes at the memory
bandwidth (Williams, Waterman, Patterson 2009), nor than the host launches its kernels. Real programs reach a
part of each rate, so the result is a range. The data pipeline is not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lib.plan.gpus import PCIE_BYTES_PER_SECOND, Gpu
from lib.plan.sharding import exposed_seconds
from lib.plan.types import Precision
from lib.units import flop_text, seconds_text

# Share of the peak that optimised training programs reach, from the rates that they publish: compiled GPT-2
# 29 % (modded-nanogpt, AdamW) to 41 % (llm.c) on H100, small ResNets on A100 25 to 37 % (cifar10-airbench).
# Convolutions at 224 pixels with real data reach less, 13 to 20 % (ffcv, timm): there it is a floor.
FLOP_SHARES = (0.25, 0.40)

# Large copies within a GPU reach 90 % of the memory bandwidth (measured on H100 and H200). The lower end is
# an assumption: training kernels mix long reads with short ones.
BANDWIDTH_SHARES = (0.6, 0.9)

SHORT_SECONDS = 5e-3  # where strategies are compared: hundreds of kernels at some ten microseconds each

# Seconds of the host for one operator of a step, from Python to the launch. Eager: PyTorch's layers take 5 to
# 25 us (https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html). Compiled: our
# assumption is half, because operators share kernels, but reading a batch and most updates are not compiled.
LAUNCH_SECONDS = {False: (5e-6, 25e-6), True: (2.5e-6, 12.5e-6)}  # by whether the model is compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of one device in one optimizer step.

    flop:             operations of all its micro-batches, forward and backward.
    activation_bytes: activations that all its micro-batches together keep for backward.
    optimizer_bytes:  optimizer state, without weights and gradients.
    frozen_bytes:     weights that are not trained.
    launches:         operators of all its micro-batches and of the update that launch a kernel.
    copied_bytes:     between its memory and main memory. No computation hides these copies: frozen models
                      wait for room, and offloaded activations are in the order of the kernels.
    """

    flop: float
    accumulation: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    frozen_bytes: int = 0
    launches: int = 0
    copied_bytes: int = 0

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
    """Estimated seconds of one optimizer step, and their bound.

    exposed_seconds: of them, at the fastest and the slowest, communication that no computation hides.
    """

    fastest_seconds: float
    slowest_seconds: float
    exposed_seconds: tuple[float, float] = (0.0, 0.0)
    bound: str  # arithmetic, memory, launching kernels; two of them where they are near each other
    reason: str

    def __str__(self) -> str:
        return f"Optimizer step: {self.span} (estimate), bounded by {self.bound}: {self.reason}"

    @property
    def span(self) -> str:
        """The range in words, from the fastest to the slowest."""
        return seconds_text(self.fastest_seconds, self.slowest_seconds)


def estimate_step_time(
    work: StepWork, gpu: Gpu, *, precision: Precision, compiled: bool = False, traffic: float = 0.0
) -> StepTime:
    """Estimate the range of a step's time on `gpu`, by the largest of its three bounds.

    traffic: seconds of all communication between devices, part of which the computation hides.
    """
    peak = peak_flop_per_second(gpu, precision=precision)
    bandwidth = gpu.bandwidth_bytes_per_second
    moved, launch = work.least_bytes_moved, LAUNCH_SECONDS[compiled]
    fast, slow = (
        {
            "arithmetic": work.flop / (peak * FLOP_SHARES[place]),
            "memory": moved / (bandwidth * BANDWIDTH_SHARES[place]),
            "launching kernels": work.launches * launch[1 - place],
        }
        for place in (1, 0)
    )
    low, high = (f"{share:.0%}" for share in FLOP_SHARES)
    units = precision if _has_units(gpu, precision) else f"fp32 (no units for {precision})"
    computed = f"{flop_text(work.flop)} at {low} to {high} of {peak / 1e12:.4g} TFLOP/s in {units}"
    low, high = (f"{share:.0%}" for share in BANDWIDTH_SHARES)
    carried = f"at least {moved / 1e9:.3g} GB at {low} to {high} of {bandwidth / 1e9:.0f} GB/s"
    assumed = f"{seconds_text(*launch)} each{', our assumption for compiled models' if compiled else ''}"
    launched = f"{work.launches:,} operators that the host launches in {assumed}"
    why = {"arithmetic": computed, "memory": carried, "launching kernels": launched}
    # Near the ridge the bound depends on the shares reached.
    bounds = [
        name for name in why if name in (max(fast, key=fast.__getitem__), max(slow, key=slow.__getitem__))
    ]
    reasons = [why[name] for name in bounds]
    copies = work.copied_bytes / PCIE_BYTES_PER_SECOND
    if copies:
        reasons.append(f"with {seconds_text(copies)} of copies from and to main memory")
    fastest, slowest = max(fast.values()) + copies, max(slow.values()) + copies
    exposed = [exposed_seconds(traffic, compute=seconds) for seconds in (fastest, slowest)]
    if exposed[0]:
        reasons.append(f"and up to {seconds_text(exposed[0])} of communication with assumed link rates")
    return StepTime(
        fastest_seconds=fastest + exposed[0],
        slowest_seconds=slowest + exposed[1],
        exposed_seconds=(exposed[0], exposed[1]),
        bound=" or ".join(bounds),
        reason="; ".join(reasons),
    )


def step_seconds(
    trained: StepWork,
    frozen: Sequence[tuple[float, int]],
    *,
    concurrent: bool,
    gpu: Gpu,
    precision: Precision,
    compiled: bool = False,
) -> tuple[float, float]:
    """Return the range, in seconds, of a step of a trained model and frozen ones.

    trained:    work of the trained model, with the activations of the device.
    frozen:     operations per step and bytes of weights of each frozen model.
    concurrent: each frozen model has its own device, and the slowest one counts, after the trained model;
        else one device does it all. In both cases one process launches the kernels of all.
    """

    def span(work: StepWork) -> tuple[float, float]:
        time = estimate_step_time(work, gpu, precision=precision, compiled=compiled)
        return time.fastest_seconds, time.slowest_seconds

    if not concurrent:
        flop = trained.flop + sum(flop for flop, _ in frozen)
        return span(replace(trained, flop=flop, frozen_bytes=sum(weight_bytes for _, weight_bytes in frozen)))
    launch = [trained.launches * seconds for seconds in LAUNCH_SECONDS[compiled]]
    trained = replace(trained, launches=0)
    alone = replace(trained, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0)
    branches = [span(replace(alone, flop=flop, frozen_bytes=weight_bytes)) for flop, weight_bytes in frozen]
    before, (fastest, slowest) = span(replace(trained, activation_bytes=0)), zip(*branches, strict=True)
    return max(before[0] + max(fastest), launch[0]), max(before[1] + max(slowest), launch[1])


def peak_flop_per_second(gpu: Gpu, *, precision: Precision) -> float:
    """Return the peak of matrix products in `precision`; that of fp32 where the GPU has no units for it."""
    if precision == "fp32" or not _has_units(gpu, precision):
        return gpu.fp32_flop_per_second
    assert gpu.half_flop_per_second is not None, f"{gpu.key} has units without a rate"
    return gpu.half_flop_per_second


def _has_units(gpu: Gpu, precision: Precision) -> bool:
    return precision == "fp32" or precision in gpu.formats
