"""Sums of micro-batches until they are read: each sample weighs the same, and no graph is kept alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.devices.base import Backend
from train.tasks.base import Sums, Totals


def test_means_are_over_samples_whatever_the_sizes() -> None:
    totals = Totals()
    totals.add(Sums(torch.tensor(6.0), 3, {"accuracy": torch.tensor(3)}))
    totals.add(Sums(torch.tensor(2.0), torch.tensor(1), {"accuracy": torch.tensor(0)}))
    assert totals.means(Backend("cpu")) == {"count": 4, "loss": 2.0, "accuracy": 0.75}


def test_a_long_evaluation_loses_nothing_to_rounding() -> None:
    totals = Totals()
    totals.add(Sums(torch.tensor(2.0**24), 1, {}))
    for _ in range(3):
        totals.add(Sums(torch.tensor(1.0), 1, {}))
    assert totals.means(Backend("cpu")) == pytest.approx({"count": 4, "loss": (2**24 + 3) / 4}, rel=1e-15)


class Holding(torch.autograd.Function):
    """A step of a graph that holds a token."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: object) -> Tensor:
        ctx.token = token
        return value.clone()


def test_what_a_backward_pass_would_need_is_let_go() -> None:
    class Token:
        pass

    token, totals = Token(), Totals()
    kept = weakref.ref(token)
    loss: Tensor = Holding.apply(torch.ones((), requires_grad=True), token)  # type: ignore[no-untyped-call]
    totals.add(Sums(loss, 1, {}))
    del token
    assert kept() is not None, "the graph holds it"
    del loss
    assert kept() is None
