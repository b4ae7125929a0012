"""A trial from the inside: what it goes through, what it reads off, and what it makes of running out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lib import kconf
from lib.config import config_from_values
from lib.devices.base import Backend
from lib.memory import peak
from lib.memory.peak import Peak
from tests.support.configs import ROOT
from tests.support.training import CPU, random_data, small_plan
from train import loop
from train.planning import probe_run


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a trial of LeNet-5 is told, on random images."""
    (tmp_path / "config").write_text("")
    resolved = kconf.load(root=ROOT, config_file=tmp_path / "config", overrides={})
    config = config_from_values(resolved.values)
    data = random_data(config, shape=(1, 28, 28), train_size=64)
    monkeypatch.setattr(probe_run, "open_training_data", lambda *_, **__: data)
    monkeypatch.setattr(probe_run, "limit_main_memory", lambda _: None)
    return {"configuration": resolved.to_json(), "usable_bytes": 10**10}


def outcome(told: dict[str, Any]) -> dict[str, Any]:
    threads = torch.get_num_threads()
    try:
        return probe_run._outcome(told, small_plan(8, 8), CPU, Backend("cpu"), root=ROOT)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_trial_warms_up_evaluates_and_is_timed(told: dict[str, Any]) -> None:
    order: list[str] = []
    step, sums = loop.optimizer_step, probe_run.evaluation_sums
    with (
        mock.patch.object(loop, "optimizer_step", lambda *a: order.append("step") or step(*a)),
        mock.patch.object(probe_run, "evaluation_sums", lambda *a: order.append("evaluation") or sums(*a)),
    ):
        found = outcome(told)
    assert found["status"] == "ok" and found["step_seconds"] > 0 and found["need_bytes"] >= 0
    assert order == ["step"] * 2 + ["evaluation"] + ["step"] * 5


def test_long_steps_are_made_less_often(told: dict[str, Any]) -> None:
    with mock.patch.object(probe_run, "LONG_SECONDS", 0.0):
        calls: list[int] = []
        step = loop.optimizer_step
        with mock.patch.object(loop, "optimizer_step", lambda *a: calls.append(1) or step(*a)):
            assert outcome(told)["status"] == "ok"
    assert len(calls) == 2 + 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            "out_of_memory",
        ),
        (RuntimeError("sizes do not match"), "failed"),
        (MemoryError(), "out_of_memory"),
    ],
)
def test_what_ends_a_trial_is_told(told: dict[str, Any], error: Exception, status: str) -> None:
    with mock.patch.object(loop, "accumulate_gradients", side_effect=error) as accumulate:
        found = outcome(told)
    assert found["status"] == status and (str(error) or "MemoryError") in found["reason"]
    assert accumulate.call_count == 1, "a trial is not made smaller"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_an_allocator_that_looked_for_room_again_is_out_of_memory(told: dict[str, Any], times: int) -> None:
    with mock.patch.object(Peak, "retries", lambda _: times):
        found = outcome(told)
    assert found["status"] == "out_of_memory" and f"{times} times" in found["reason"]


def test_on_a_gpu_need_is_what_is_reserved_and_what_lies_beside_it() -> None:
    devices = torch.device("cuda", 0), torch.device("cuda", 1)
    backend = mock.Mock(device=devices[0], devices=devices)
    free = {devices[0]: iter([1000, 900]), devices[1]: iter([1000, 700])}
    numbers = {"max_memory_reserved": 250, "memory_reserved": 200, "reset_peak_memory_stats": None}
    cuda = mock.Mock(
        mem_get_info=lambda device: (next(free[device]), 4000),
        memory_stats=lambda device: {"num_alloc_retries": device.index},
        **{name: mock.Mock(return_value=value) for name, value in numbers.items()},
    )
    with mock.patch.object(peak.torch, "cuda", cuda):
        found = Peak(backend)
        # Of the second 300 are gone, of which the allocator holds 200 now and held 250 at most.
        assert found.need_bytes() == 250 + 100 and found.retries() == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux keeps this count")
def test_what_another_process_took_is_not_needed() -> None:
    """A process that is started by a large one, and what a process took before it began to count."""
    large = torch.ones(60_000_000)
    program = (
        "from lib.devices.base import Backend; from lib.memory.peak import Peak; import torch;"
        "torch.ones(30_000_000); found = Peak(Backend('cpu')); torch.ones(10_000_000);"
        "print(found.need_bytes())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 39_000_000 < int(done.stdout) < 60_000_000 < large.nbytes
