"""Storages of a compiled step: simulated as Inductor makes them when it compiles and runs."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lib.config import Config
from scripts.bench.compiled_memory import measured, peak
from tests.support.training import CPU, CPU_TRIAL, random_data, small_config
from train.planning.memory_estimate import plan_of, trace_memory
from train.training_data import TrainingData

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Inductor uses what torch deprecates
    from lib.memory import compiled

pytestmark = pytest.mark.slow


def case() -> tuple[Config, TrainingData]:
    config = small_config(
        "lenet5", optimizer="adamw", augment="none", data_placement="stream",
        compile="manual", compile_model=True, device="cpu", target_effective_batch=32,
    )  # fmt: skip
    return config, random_data(config, shape=(1, 28, 28), train_size=64)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_compiled_step_takes_what_is_said() -> None:
    config, data = case()
    plan = plan_of(dataclasses.replace(CPU_TRIAL, compile=True))
    real, said = measured(config, plan, data), peak(config, plan, data)
    assert 0.99 * real <= said <= 1.02 * real
    # A step that is not compiled is not what is compared.
    assert peak(config, plan_of(CPU_TRIAL), data) != said


def test_no_compiler_of_code_is_called() -> None:
    config, data = case()
    plan = plan_of(dataclasses.replace(CPU_TRIAL, compile=True))
    calls = mock.Mock(side_effect=AssertionError("a compiler was called"))
    with mock.patch.object(subprocess, "check_output", calls), mock.patch.object(subprocess, "run", calls):
        assert peak(config, plan, data) > 0


def test_a_loss_in_the_graph_is_traced_as_a_forward_pass() -> None:
    config, data = case()
    plan = plan_of(dataclasses.replace(CPU_TRIAL, compile=True))
    traces = [
        trace_memory(config, dataclasses.replace(plan, compile_parts=parts), data, hardware=CPU)
        for parts in (("model",), ("model", "loss"))
    ]
    apart, within = (trace.launches for trace in traces)
    assert 0 < within.forward <= apart.forward and 0 < within.backward <= apart.backward
    assert all(trace.trace.at_peak()["activations"] > 0 for trace in traces)


def test_what_does_not_compile_loads_no_compiler() -> None:
    code = "import sys, train.planning.command; print('torch._dynamo' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_a_view_of_a_buffer_is_no_storage() -> None:
    base = torch.zeros(4, 6)
    view: Tensor = compiled._view(base, (2, 3), (3, 1), 6)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert view.storage_offset() == 6 and isinstance(nn.Parameter(view), Tensor)
