"""Activations in main memory: the same bits, less of the device's memory, and weights that stay."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.devices.base import Backend
from lib.nn import activation_offload
from lib.nn.activation_checkpointing import Recompute, configure_recomputation
from lib.nn.activation_offload import Offloading
from lib.plan import plan as make_plan
from lib.plan.fitting import StepSettings
from tests.contract.cases import inputs_of, loss_of, targets_of, tiny
from tests.support.configs import load_hardware, make_config, make_facts
from tests.support.outlooks import outlook
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import CPU, CPU_TRIAL, random_data, small_config, small_job, small_plan
from train.build import make_job
from train.job import Progress
from train.loop import accumulate_gradients
from train.planning.memory_estimate import MemoryTraces
from train.record import Record


@pytest.fixture(autouse=True)
def _everything_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was taken to main memory."""
    found: list[Tensor] = []
    take = activation_offload._to_host
    monkeypatch.setattr(activation_offload, "_to_host", lambda tensor: found.append(tensor) or take(tensor))
    return found


def gradients(name: str, recompute: Recompute, *, away: bool) -> dict[str, Tensor]:
    model, spec = tiny(name)
    configure_recomputation(model, recompute)
    with Offloading(model) if away else contextlib.nullcontext():
        loss = loss_of(model(inputs_of(spec, 4)), targets_of(spec, 4))
    loss.backward()
    found = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    return found | dict(model.named_buffers())


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("name", ["gpt2", "resnet18", "resnet_bk", "lenet5"])
def test_gradients_are_the_same_to_the_bit(name: str, recompute: Recompute, moved: list[Tensor]) -> None:
    here, away = (gradients(name, recompute, away=away) for away in (False, True))
    assert here.keys() == away.keys() and moved
    assert all(torch.equal(value, away[key]) for key, value in here.items())


def test_weights_and_small_tensors_stay(moved: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16), Offloading(model):
        model(torch.randn(7, 6))
    shapes = {tuple(tensor.shape) for tensor in moved}
    assert (7, 50) in shapes and not shapes & {(6, 50), (50, 6), (3, 50), (50, 3)}
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 7 * 50 * 4)
    moved.clear()
    with Offloading(model):
        model(torch.randn(7, 6))
    assert {tuple(tensor.shape) for tensor in moved} == {(7, 50)}


def test_a_view_that_repeats_is_not_spread_out(moved: list[Tensor]) -> None:
    x = torch.randn(1, 8, requires_grad=True)
    with Offloading(nn.Linear(2, 2)):
        (x.expand(9, 8) * torch.randn(9, 8, requires_grad=True)).sum().backward()
    assert [tuple(tensor.shape) for tensor in moved] == [(9, 8)]
    assert x.grad is not None and x.grad.shape == (1, 8)


def trial(device: str) -> StepSettings:
    return dataclasses.replace(CPU_TRIAL, device=device, micro_batch=16, accumulates=False)


@pytest.mark.slow
def test_the_prediction_sees_what_has_gone() -> None:
    config = small_lm_config()
    data = text_data(config)

    def activations(device: str, **changes: Any) -> int:
        changed = config.replace(**changes)
        return MemoryTraces(changed, data).predictor(CPU)(trial(device)).get("activations", 0)

    for device, less in (("cuda", True), ("cpu", False)):
        here, away = (activations(device, activation_offload=choice) for choice in (False, True))
        assert (away < 0.5 * here) if less else (away == here)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [4, 16])
def test_the_bytes_that_are_copied_are_those_of_a_real_micro_batch(micro_batch: int) -> None:
    """To main memory and back, of each micro-batch; the time of a step has them."""
    config = small_config("lenet5", precision="fp32", activation_offload=True)
    data = random_data(config, shape=(1, 28, 28), train_size=32)
    step = dataclasses.replace(CPU_TRIAL, device="cuda", micro_batch=micro_batch, accumulates=True)
    found = MemoryTraces(config, data).of(step, CPU)
    plan = small_plan(micro_batch)
    job = make_job(config, plan, data, hardware=CPU, backend=Backend("cpu"), record=Record())
    job.keeping = real = Offloading(job.model)
    for _ in accumulate_gradients(job, Progress()):
        pass
    assert found.copied_bytes == 2 * real.byte_count > 0
    away, here = (outlook("h100-80g", 32, activation_offload=choice).step_time for choice in (True, False))
    assert away is not None and here is not None and "copies from and to main memory" in away.reason
    assert "copies" not in here.reason and away.fastest_seconds > here.fastest_seconds


def test_where_there_is_no_other_memory_nothing_happens_and_the_plan_says_so(moved: list[Tensor]) -> None:
    config = small_config("lenet5", activation_offload=True)
    job = small_job(config, small_plan(8), random_data(config, shape=(1, 28, 28), train_size=8))
    with job.keeping:
        job.forward(torch.randn(8, 1, 28, 28, dtype=torch.float64))
    assert not moved

    def why(machine: str) -> str:
        requested = make_config("lenet5", activation_offload=True)
        return make_plan(requested, load_hardware(machine), make_facts("lenet5")).reasons["memory"]

    assert "CONFIG_ACTIVATION_OFFLOAD=y does nothing here" in why("cpu-24g-amx")
    assert "CONFIG_ACTIVATION_OFFLOAD" not in why("rtx3090")
