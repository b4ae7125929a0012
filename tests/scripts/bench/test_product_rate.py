"""The share of the rate of matrix products that a step reaches."""

from __future__ import annotations

import pytest
import torch

from lib.devices.base import Backend
from scripts.bench.product_rate import SIZE, product_rate, shares


def test_a_share_is_the_steps_rate_over_the_products() -> None:
    head, fp32, bf16 = shares(4e9, {"fp32": 0.1, "bf16": 0.05}, {"fp32": 2e11, "bf16": 4e11})
    assert head.startswith("a step has 4 GFLOP")
    assert fp32.split() == ["fp32", "200", "GFLOP/s", "40", "GFLOP/s", "20.0%", "of", "it"]
    assert bf16.split() == ["bf16", "400", "GFLOP/s", "80", "GFLOP/s", "20.0%", "of", "it"]


def test_the_rate_is_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product takes a second by the clock, the others half of one."""
    now = [0.0]
    products: list[torch.dtype] = []

    def product(left: torch.Tensor, _: torch.Tensor) -> None:
        now[0] += 0.5 if products else 1.0
        products.append(left.dtype)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert product_rate("bf16", Backend("cpu")) == pytest.approx(2 * SIZE**3 / 0.5)
    assert {*products} == {torch.bfloat16}
