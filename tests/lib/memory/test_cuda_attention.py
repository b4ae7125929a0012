"""Attention on CUDA: what its kernels keep, and what they allocate while they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lib.memory.live import LiveBytes
from lib.memory.simulation import simulation
from lib.plan.types import Kind

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 200, 64
ROWS = 256  # queries, as flash rounds them
ALL_PAIRS = 4 * BATCH * HEADS * LENGTH * LENGTH  # bytes of the weights of attention in fp32


def attend(shared: int, dtype: torch.dtype, **options: Any) -> tuple[list[int], int]:
    """Bytes of what the forward pass made, in order, and the peak of the backward pass beyond what was there.

    shared: heads that share keys and values.
    """
    live = LiveBytes()
    with simulation("cuda"):
        query, key, value = (
            torch.zeros(BATCH, heads, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
            for heads in (HEADS, HEADS // shared, HEADS // shared)
        )
        live.add([query, key, value])
        start = live.mark()
        with live:
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=shared > 1, **options)
            grad = torch.zeros_like(out)
            middle = live.mark()
            out.backward(grad)  # type: ignore[no-untyped-call]
        assert key.grad is not None and key.grad.shape == key.shape
    events = [byte_count for _, byte_count in live.trace().events]
    held, highest = 0, 0
    for byte_count in events[middle:]:
        held += byte_count
        highest = max(highest, held)
    return [byte_count for byte_count in events[start:middle] if byte_count > 0], highest


def flash_scratch() -> int:
    """Sums of rows, and the gradient of queries in fp32."""
    return 4 * BATCH * ROWS * HEADS * (1 + WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_backward_sums_the_gradient_of_queries_in_fp32(dtype: torch.dtype) -> None:
    made, highest = attend(1, dtype)
    tensor = 2 * BATCH * HEADS * LENGTH * WIDTH
    assert max(made) == tensor
    assert highest == flash_scratch() + 3 * tensor


def test_flash_reads_shared_keys_as_they_are_and_expands_their_gradients() -> None:
    tensor = 2 * BATCH * HEADS * LENGTH * WIDTH
    made, highest = attend(4, torch.bfloat16)
    assert sorted(made)[-2:] == [tensor, tensor], "the result and its gradient; no copies of keys and values"
    assert highest == flash_scratch() + 2 * tensor + (1 + 2 / 4) * tensor


def test_without_flash_shared_keys_are_repeated_and_all_pairs_kept() -> None:
    assert max(attend(1, torch.float32)[0]) < ALL_PAIRS
    assert max(attend(4, torch.float32)[0]) == ALL_PAIRS


def test_values_of_another_width_than_keys_are_not_for_flash() -> None:
    """Multi-head latent attention has such; the flash kernel gives what is as wide as the queries."""
    with simulation("cuda"):
        wide, narrow = (
            torch.zeros(2, 8, 16, width, dtype=torch.bfloat16, requires_grad=True) for width in (96, 64)
        )
        out = F.scaled_dot_product_attention(wide, wide, narrow, is_causal=True)
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert out.shape == narrow.shape and narrow.grad is not None and narrow.grad.shape == narrow.shape


@pytest.mark.parametrize(("kind", "matrices"), [("cuda", 4), ("cpu", 3)])
def test_the_backward_pass_of_softmax_makes_a_product_on_cuda(kind: Kind, matrices: int) -> None:
    """Beside its output, the gradient of that and the result."""
    with simulation(kind), LiveBytes() as live:
        scores = torch.empty(64, 64, requires_grad=True)
        weights, gradient = torch.softmax(scores, dim=-1), torch.empty(64, 64)
        weights.backward(gradient)
    assert live.trace().peak_bytes == (matrices + 1) * 4 * 64 * 64  # and the scores
