"""Estimated step times: arithmetic by hand, the two bounds, and rates that others published."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lib.plan.gpus import Gpu, gpu_of
from lib.plan.roofline import StepWork, estimate_step_time, peak_flop_per_second, step_seconds

# 100 TFLOP/s in 16 bits, 10 in fp32, 1 TB/s.
ROUND_GPU = dataclasses.replace(
    gpu_of("a100-80g"),
    half_flop_per_second=100e12,
    fp32_flop_per_second=10e12,
    bandwidth_bytes_per_second=1e12,
)


def work(**changes: Any) -> StepWork:
    nothing = StepWork(
        flop=0.0, accumulation=1, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0, activation_bytes=0
    )
    return dataclasses.replace(nothing, **changes)


def gpt2_work(tokens: int) -> StepWork:
    """GPT-2 with 124 M parameters and 1024 tokens of context: 6 N + 12 L H Q T = 855 MFLOP a token."""
    parameters = 124_439_808
    return StepWork(
        flop=tokens * 855e6,
        accumulation=1,
        weight_bytes=4 * parameters,
        gradient_bytes=4 * parameters,
        optimizer_bytes=8 * parameters,
        activation_bytes=tokens * 10**6,
    )


def test_arithmetic_by_hand() -> None:
    time = estimate_step_time(work(flop=40e12), ROUND_GPU, precision="bf16")
    assert time.fastest_seconds == pytest.approx(1.0)
    assert time.slowest_seconds == pytest.approx(1.6)
    assert time.bound == "arithmetic"
    assert str(time) == (
        "Optimizer step: 1 to 1.6 s (estimate), bounded by arithmetic: "
        "40 TFLOP at 25% to 40% of 100 TFLOP/s in bf16"
    )


def test_copies_to_main_memory_are_hidden_by_nothing() -> None:
    time = estimate_step_time(work(flop=40e12, copied_bytes=64_000_000_000), ROUND_GPU, precision="bf16")
    assert (time.fastest_seconds, time.slowest_seconds) == pytest.approx((3.0, 3.6))
    assert time.reason.endswith("; with 2 s of copies from and to main memory")


def test_bytes_by_hand() -> None:
    # Weights of 1 byte are read twice by each of 3 micro-batches, then read and written by the update.
    assert work(weight_bytes=1, accumulation=3).least_bytes_moved == 8
    # Gradients are written, read and written, read and written, and read by the update.
    assert work(gradient_bytes=1, accumulation=3).least_bytes_moved == 6
    assert work(optimizer_bytes=1, accumulation=3).least_bytes_moved == 2
    assert work(activation_bytes=1, accumulation=3).least_bytes_moved == 2
    assert work(frozen_bytes=1, accumulation=3).least_bytes_moved == 6, "read forward and backward"
    time = estimate_step_time(work(activation_bytes=450 * 10**9), ROUND_GPU, precision="bf16")
    assert time.fastest_seconds == pytest.approx(1.0)
    assert time.slowest_seconds == pytest.approx(1.5)
    assert time.bound == "memory"
    assert "at least 900 GB at 60% to 90% of 1000 GB/s" in time.reason


def test_frozen_models_behind_what_is_trained_by_hand() -> None:
    """On devices of their own the slower one counts, and the activations are theirs."""
    trained = work(flop=40e12, activation_bytes=900 * 10**9)
    frozen = [(80e12, 0), (40e12, 0)]
    at_once = step_seconds(trained, frozen, concurrent=True, gpu=ROUND_GPU, precision="bf16")
    assert at_once == pytest.approx((1.0 + 2.0, 1.6 + 3.2))
    on_one = step_seconds(trained, frozen, concurrent=False, gpu=ROUND_GPU, precision="bf16")
    assert on_one == pytest.approx((4.0, 6.4))


def test_the_larger_bound_counts() -> None:
    both = work(flop=40e12, activation_bytes=45 * 10**9)
    assert estimate_step_time(both, ROUND_GPU, precision="bf16").bound == "arithmetic"
    faster = dataclasses.replace(ROUND_GPU, half_flop_per_second=4000e12)
    time = estimate_step_time(both, faster, precision="bf16")
    assert time.bound == "memory" and time.fastest_seconds == pytest.approx(0.1)


def test_near_the_ridge_both_are_named() -> None:
    # 1 to 1.6 s of arithmetic, 1.03 to 1.55 s of bytes.
    time = estimate_step_time(work(flop=40e12, activation_bytes=465 * 10**9), ROUND_GPU, precision="bf16")
    assert time.bound == "arithmetic or memory"
    assert "40 TFLOP at" in time.reason and "at least 930 GB" in time.reason


def test_a_format_without_units_runs_at_the_rate_of_fp32() -> None:
    assert peak_flop_per_second(ROUND_GPU, precision="fp32") == 10e12
    assert peak_flop_per_second(ROUND_GPU, precision="bf16") == 100e12
    for key in ("v100-16g", "t4"):
        gpu = gpu_of(key)
        assert peak_flop_per_second(gpu, precision="bf16") == gpu.fp32_flop_per_second
        assert peak_flop_per_second(gpu, precision="fp16") == gpu.half_flop_per_second
        time = estimate_step_time(work(flop=1e12), gpu, precision="bf16")
        assert time.reason.endswith("TFLOP/s in fp32 (no units for bf16)")
    for key in ("p100-16g", "m2-max"):
        assert peak_flop_per_second(gpu_of(key), precision="fp16") == gpu_of(key).fp32_flop_per_second


@pytest.mark.parametrize(
    ("tokens_per_second", "slack"),
    [
        (332_000, 1.0),  # modded-nanogpt's second record: AdamW, plain torch.compile
        (475_000, 1.05),  # llm.c, written by hand in CUDA: a little more than what PyTorch reaches
    ],
)
def test_published_rates_of_gpt2_on_h100_lie_in_the_range(tokens_per_second: int, slack: float) -> None:
    tokens = 65_536
    time = estimate_step_time(gpt2_work(tokens), gpu_of("h100-80g"), precision="bf16")
    seconds = tokens / tokens_per_second
    assert time.fastest_seconds / slack <= seconds <= time.slowest_seconds
    assert time.bound == "arithmetic"


def test_more_work_takes_longer_and_a_faster_gpu_less() -> None:
    def fastest(gpu: Gpu, tokens: int) -> float:
        return estimate_step_time(gpt2_work(tokens), gpu, precision="bf16").fastest_seconds

    assert fastest(gpu_of("h100-80g"), 2048) < fastest(gpu_of("h100-80g"), 4096)
    order = [fastest(gpu_of(key), 65_536) for key in ("b200", "h100-80g", "a100-80g", "l4", "t4")]
    assert order == sorted(order)


def test_it_is_always_called_an_estimate() -> None:
    for flop in (1e3, 1e9, 1e12, 1e17):
        text = str(estimate_step_time(work(flop=flop), ROUND_GPU, precision="fp32"))
        assert text.startswith("Optimizer step: ") and " (estimate), " in text and "\n" not in text
        assert " to " in text
    compiled = estimate_step_time(work(flop=1.0, launches=9), ROUND_GPU, precision="bf16", compiled=True)
    assert compiled.reason.endswith("in 2.5 to 12.5 us each, our assumption for compiled models")


def test_a_small_step_is_bound_by_launching_its_kernels() -> None:
    """LeNet-5 has some 70 operators a step, whose arithmetic takes microseconds."""
    small = work(flop=1e9, launches=100)
    time = estimate_step_time(small, ROUND_GPU, precision="bf16")
    assert (time.fastest_seconds, time.slowest_seconds) == pytest.approx((100 * 5e-6, 100 * 25e-6))
    assert time.bound == "launching kernels"
    assert time.reason == "100 operators that the host launches in 5 to 25 us each"
    compiled = estimate_step_time(small, ROUND_GPU, precision="bf16", compiled=True)
    assert compiled.slowest_seconds == pytest.approx(time.slowest_seconds / 2)
    assert "our assumption" in compiled.reason
    large = estimate_step_time(work(flop=40e12, launches=100), ROUND_GPU, precision="bf16")
    assert large.bound == "arithmetic"
    between = estimate_step_time(work(flop=4e10, launches=100), ROUND_GPU, precision="bf16")
    assert between.bound == "arithmetic or launching kernels"


def test_communication_that_the_computation_does_not_hide_is_added() -> None:
    alone = estimate_step_time(work(flop=40e12), ROUND_GPU, precision="bf16")
    hidden = estimate_step_time(work(flop=40e12), ROUND_GPU, precision="bf16", traffic=0.1)
    assert hidden == alone
    shown = estimate_step_time(work(flop=40e12), ROUND_GPU, precision="bf16", traffic=2.0)
    assert shown.fastest_seconds == pytest.approx(1.0 + 2.0 - 0.5)
    assert "1.5 s of communication" in shown.reason
