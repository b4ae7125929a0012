"""The device's rate of matrix products, and the share of it that training steps reach."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from lib.devices.base import Backend
from lib.plan.types import Precision

SIZE: Final = 1024  # rows and columns
CALLS: Final = 20
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def product_rate(precision: Precision, backend: Backend) -> float:
    """Return the FLOP/s of a product of two square matrices, the fastest of `CALLS`."""
    matrix = torch.ones(SIZE, SIZE, dtype=DTYPES[precision], device=backend.device)
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        backend.synchronize()
        times.append(time.perf_counter() - began)
    return 2 * SIZE**3 / min(times)


def shares(
    step_flop: float, step_seconds: Mapping[Precision, float], rates: Mapping[Precision, float]
) -> Iterator[str]:
    """Yield the rate of products, and of a step with `step_flop`, for each precision."""
    yield f"a step has {step_flop / 1e9:.3g} GFLOP; products of {SIZE} x {SIZE} matrices, and the step:"
    for precision, seconds in step_seconds.items():
        rate, reached = rates[precision], step_flop / seconds
        yield f"{precision:32}{_text(rate):>11}{_text(reached):>14}{reached / rate:>8.1%} of it"


def _text(rate: float) -> str:
    return f"{rate / 1e9:,.3g} GFLOP/s"
