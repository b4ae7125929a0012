"""The estimated time of a step says what it does not know."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lib.plan.types import CompilePart
from tests.support.configs import load_hardware
from tests.support.training import CPU, data_of, small_config, small_plan
from train.planning import step_estimate
from train.planning.memory_estimate import trace_memory
from train.planning.step_estimate import step_time_of

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_a_step_by_cuda_graphs_is_traced_as_any_other() -> None:
    """They hide its operators, and what the backward pass keeps."""
    config = small_config()
    data = data_of(config)
    data = dataclasses.replace(data, facts=dataclasses.replace(data.facts, loss_apart=""))
    traces = [
        trace_memory(
            config,
            small_plan(8, compile=True, compile_parts=("model", "loss"), cuda_graphs=graphs),
            data,
            hardware=CPU,
        )
        for graphs in (False, True)
    ]
    assert traces[0] == traces[1] and traces[0].launches.forward > 4


def test_a_smaller_last_micro_batch_is_less_work_unless_it_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    data = data_of(config)
    found = trace_memory(config, small_plan(8, 8), data, hardware=CPU)
    monkeypatch.setattr(step_estimate, "estimate_step_time", lambda work, *_, **__: work)
    for compiled, rows in ((False, 17), (True, 24)):
        plan = small_plan(8, 8, 1, compile=compiled, device="cuda")
        work: Any = step_time_of(plan, found, data, config, load_hardware("a10g"))
        assert work.flop == found.step_flop * rows // 16 and work.accumulation == 3
        assert work.activation_bytes == found.trace.at_peak().get("activations", 0) * rows // 8
        assert work.launches == found.launches.of_step(3)


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
    what = f"the update is compiled, but counted with its {found.launches.update:,} operators"
    assert counted == f"{without}; {what}" and found.launches.update > 10
