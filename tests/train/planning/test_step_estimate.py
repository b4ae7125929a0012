"""The estimated time of a step says what it does not know."""

from __future__ import annotations

import pytest

from lib.plan.types import CompilePart
from tests.support.configs import load_hardware
from tests.support.training import CPU, data_of, small_config, small_plan
from train.planning.memory_estimate import trace_memory
from train.planning.step_estimate import step_time_of

pytestmark = pytest.mark.slow


def test_a_compiled_update_is_counted_as_one_that_is_not() -> None:
    config = small_config(optimizer="adam_atan2")
    data = data_of(config)
    found = trace_memory(config, small_plan(8), data, hardware=CPU)
    parts: tuple[tuple[CompilePart, ...], ...] = (("model",), ("model", "update"))
    reasons = []
    for each in parts:
        plan = small_plan(8, device="cuda", compile=True, compile_parts=each)
        time = step_time_of(plan, found, data, config, load_hardware("a10g"))
        assert time is not None
        reasons.append(time.reason)
    without, counted = reasons
    what = f"the {found.launches.update:,} of the update are counted as they are not compiled"
    assert counted == f"{without}; {what}" and found.launches.update > 10
