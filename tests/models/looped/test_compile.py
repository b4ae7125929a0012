"""What is compiled of a looped transformer: an iteration, for the number of them is not known."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from models.looped.blocks import EnergyForm
from tests.train.test_build import Wrapping, job_of


@pytest.mark.slow
def test_an_iteration_is_compiled_and_not_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def fake(module: Any) -> nn.Module:
        compiled.append(module)
        return nn.Identity()

    monkeypatch.setattr("lib.nn.compile.compiled", fake)
    job = job_of("looped", norm_batch=0, plan={"compile": True}, backend=Wrapping())
    assert set(compiled) == {EnergyForm.step} and job.forward is job.wrapped
