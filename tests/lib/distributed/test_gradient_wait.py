"""Waiting for gradients is timed from a rank's last gradient to the end of DDP's reduction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.distributed.gradient_wait import GradientWait
from tests.e2e.gradient_wait_worker import LATE_SECONDS, STEPS
from tests.e2e.workers import run_worker


@pytest.mark.slow
def test_a_rank_that_is_early_waits_for_the_late_one(tmp_path: Path) -> None:
    run_worker("gradient_wait_worker", tmp_path)
    waited, readings, shares, gradients = json.loads((tmp_path / "found").read_text())
    assert len(readings) == 2 * STEPS, "once in a step, not in each micro-batch"
    each = [end - begin for begin, end in zip(readings[::2], readings[1::2], strict=True)]
    assert waited == pytest.approx(sum(each)) and each[-1] >= LATE_SECONDS
    assert [count / gradients[0] for count in gradients[::2]] == [1, 2, 3], "all of a step are there before"
    assert len(shares) == STEPS and all(0 < share < 1 for share in shares)


def test_on_a_gpu_events_are_read_when_both_are_over_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.number, self.over = len(made), False
            made.append(self)

        def record(self) -> None:
            self.recorded = True

        def query(self) -> bool:
            return self.over

        def elapsed_time(self, end: Event) -> float:
            assert self.over and end.over and end.number == self.number + 1
            return 1000.0 * end.number

    monkeypatch.setattr(torch.cuda, "Event", Event)
    wait, weight = GradientWait(torch.device("cuda", 0)), torch.ones(3, requires_grad=True)
    for _ in range(2):
        loss = weight.sum()
        with wait.after(loss):
            torch.autograd.backward(loss, torch.ones_like(loss))
    assert len(made) == 4 and wait.seconds() == 0.0, "the device has not come so far"
    made[0].over = made[1].over = True
    assert wait.seconds() == 1.0
    made[2].over = made[3].over = True
    assert wait.seconds() == wait.seconds() == 4.0
