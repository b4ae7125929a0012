"""What is refused before the data are opened."""

from __future__ import annotations

import pytest

from lib.errors import PlanError
from lib.plan.gpus import parse_gpu
from tests.support.training import small_config
from train.planning import run_plan


def test_a_gpu_that_is_in_use_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is reserved alone: nothing is known of the model."""
    monkeypatch.setattr(run_plan, "probe", lambda _: parse_gpu("rtx3090:1G"))
    with pytest.raises(PlanError, match=r"^lenet5 does not fit on .*: .*; free some memory"):
        run_plan.refuse(small_config("lenet5", device="auto", auto_method="predict"), None)
