"""The peak of training that a run records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lib.devices.base import Backend
from lib.memory import peak


def test_growth_is_exact_above_what_the_process_took_before_and_else_the_largest_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"VmRSS": 100, "VmHWM": 500}
    monkeypatch.setattr(peak, "resident_bytes", lambda name="VmRSS": sizes[name])
    measure = peak.training_peak(Backend("cpu"))
    found = []
    for now, highest in ((90, 500), (130, 500), (120, 500), (400, 650), (110, 650)):
        sizes |= {"VmRSS": now, "VmHWM": highest}
        found.append(measure())
    assert found == [0, 30, 30, 550, 550]


def test_elsewhere_it_is_that_of_the_backend() -> None:
    backend = SimpleNamespace(device=torch.device("meta"), peak_memory_bytes=lambda: None)
    assert peak.training_peak(cast(Backend, backend))() is None
    backend.peak_memory_bytes = lambda: 7
    assert peak.training_peak(cast(Backend, backend))() == 7
