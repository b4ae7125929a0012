"""XLA devices, as far as they can be known without any: a stand-in for torch_xla says what it was asked."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lib.devices import accelerators, probe
from lib.devices.backend import open_backend
from lib.devices.base import Backend
from lib.errors import PlanError
from lib.plan.types import Hardware
from tests.support.configs import load_hardware, make_config
from tests.support.stubbed import XLA_STUB, asked_for_in_a_step, job_on
from tests.support.training import (
    MemoryRecord,
    Wrapped,
    largest_difference,
    random_data,
    small_config,
    trained,
)
from train.build import placement_of
from train.job import Progress, evaluate
from train.loop import train
from train.tasks.base import Sums

LENET_WEIGHTS = 10


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """lib.devices.xla on the stand-in."""
    monkeypatch.syspath_prepend(str(XLA_STUB))
    yield importlib.import_module("lib.devices.xla")
    for name in [name for name in sys.modules if name == "lib.devices.xla" or name.startswith("torch_xla")]:
        del sys.modules[name]


@pytest.fixture
def calls(xla: ModuleType) -> list[str]:
    """What the stand-in was asked for."""
    requested: list[str] = xla.torch_xla.CALLS
    return requested


class Counted(Wrapped):
    """Counts on the device."""

    def training(self, *arguments: Any) -> Sums:
        sums = super().training(*arguments)
        return Sums(sums.loss, torch.tensor(sums.count), sums.metrics)


# The loop


@pytest.mark.parametrize(
    ("cut", "expected"),
    [((24,), ["update", "sync"]), ((8, 8, 8), ["sync", "sync", "update", "sync"])],
)
def test_every_micro_batch_is_a_graph_and_the_update_is_in_the_last(
    cut: tuple[int, ...], expected: list[str], calls: list[str]
) -> None:
    assert asked_for_in_a_step(job_on(open_backend("xla", world=1), *cut), calls) == expected


def test_every_batch_of_an_evaluation_is_a_graph(calls: list[str]) -> None:
    """And what puts averaged weights into the model, and its own back, is in none of them."""
    job = job_on(open_backend("xla", world=1), 8, 8, ema=True, ema_decay=0.5)
    calls.clear()
    evaluate(job)
    assert calls == ["sync"] * (2 + 2)


def test_what_is_saved_is_what_was_carried_out(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_on(open_backend("xla", world=1), 8, 8, checkpoint_interval_steps=1, eval_interval_steps=100)
    record = job.record
    assert isinstance(record, MemoryRecord)
    job.optimizer.register_step_post_hook(lambda *_: calls.append("update"))
    keep, fetch = record.save, torch.Tensor.cpu

    def save(step: int, state: Mapping[str, Any], *, best: bool) -> None:
        calls.append("save")
        keep(step, state, best=best)

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("fetch")
        return fetch(tensor)

    monkeypatch.setattr(record, "save", save)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    train(job, Progress())
    places = [place for place, call in enumerate(calls) if call == "save"]
    assert len(places) == 3
    for place in places:
        before = [call for call in calls[:place] if call != "fetch"]
        assert before[-1] == "sync", "nothing is pending"
        # Weights, and the momentum of each.
        assert calls[place - 2 * LENET_WEIGHTS : place] == ["fetch"] * (2 * LENET_WEIGHTS)


def test_a_state_keeps_its_shape_on_the_way_to_the_host(xla: ModuleType) -> None:
    state = {"a": [torch.ones(2), (1, torch.zeros(1))], "b": None, "c": 2.5}
    host = xla.XlaBackend().to_host(state)
    assert str(host) == str(state) and Backend("cpu").to_host(state) is state


def test_nothing_but_where_it_is_computed_differs(xla: ModuleType) -> None:
    settings: dict[str, Any] = {"ema": True, "ema_decay": 0.5, "eval_interval_steps": 1}
    there = trained(job_on(xla.XlaBackend(), 8, 8, 4, **settings))
    assert largest_difference(there, trained(job_on(Backend("cpu"), 8, 8, 4, **settings))) == 0


def test_single_precision_is_asked_for_by_name(calls: list[str]) -> None:
    backend = open_backend("xla", world=1)
    backend.configure_products("fp32")
    backend.configure_products("bf16")
    assert calls == ["device", "products highest", "products default"]
    calls.clear()
    job_on(backend, 8)
    assert calls == ["products highest"]


def test_the_clock_is_read_when_all_is_done(calls: list[str]) -> None:
    open_backend("xla", world=1).synchronize()
    assert calls == ["device", "sync, waiting"]


def test_rows_of_metrics_count_compilations(xla: ModuleType, calls: list[str]) -> None:
    calls.clear()
    job = job_on(xla.XlaBackend("xla"), 40, 1)
    assert job.backend.compilations(compiled=False) == {"compilations": 0, "compile_seconds": 0.0}
    job.record = record = MemoryRecord()
    train(job, Progress())
    rows = [row for row in record.rows if row["kind"] == "train"]
    assert [(row["compilations"], row["compile_seconds"]) for row in rows] == [(2, 3.0)] * len(rows)
    assert rows and Backend("cpu").compilations(compiled=False) == {}


def test_sums_are_of_single_precision(xla: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(xla.XlaBackend, "all_reduce_sum", lambda _, tensor: seen.append(tensor.dtype))
    evaluate(job_on(xla.XlaBackend(), 8))
    assert seen == [torch.float32]


# Several processes; two of them in tests/e2e/test_xla.py


@pytest.fixture
def one_of_one(xla: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A process group of one, which goes the way of several."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
    for name, value in ({"MASTER_ADDR": "127.0.0.1"} | variables).items():
        monkeypatch.setenv(name, value)
    backend = open_backend("xla", world=None)
    assert isinstance(backend, xla.DistributedXlaBackend)
    yield backend
    backend.close()


def test_gradients_are_averaged_once_before_they_are_used(one_of_one: Backend, calls: list[str]) -> None:
    assert calls == ["rendezvous", "device"], "in this order"
    averaged = f"all_reduce {LENET_WEIGHTS} x 1"
    assert asked_for_in_a_step(job_on(one_of_one, 8, 8), calls) == ["sync", averaged, "update", "sync"]
    counted = asked_for_in_a_step(job_on(one_of_one, 8, 8, task=Counted), calls)
    assert counted == ["sync", averaged, "all_reduce 1 x 1", "update", "sync"]
    model = nn.Linear(2, 2)
    assert one_of_one.wrap(model, share_buffers=False) is model
    with one_of_one.without_gradient_sync(model):
        view = torch.ones(2, 3)[0]
        one_of_one.all_reduce_sum(view)
    assert view.tolist() == [1, 1, 1]


# What there is


def answering(monkeypatch: pytest.MonkeyPatch, *command: str) -> None:
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(accelerators.COMMANDS, "xla", command)


def test_without_torch_xla_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PlanError, match=r"^CONFIG_DEVICE_XLA .*: torch_xla is not installed; .*AUTO=y$"):
        probe.probe("xla")


def test_a_torch_xla_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, "sleep", "600")
    monkeypatch.setattr(accelerators, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(PlanError, match=r"did not answer within 0.1 s; end what is using the devices"):
        probe.probe("xla")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo Traceback >&2; echo no symbol >&2; exit 1", "no symbol"),
        ("exit 3", "status 3"),
    ],
)
def test_a_torch_xla_that_does_not_load_says_why(
    command: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, "sh", "-c", command)
    with pytest.raises(PlanError, match=f"^CONFIG_DEVICE_XLA is not possible: {why}; see whether"):
        probe.probe("xla")


def test_the_devices_are_those_that_it_names(
    xla: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_DEVICES", "2")
    assert xla.main() == 0
    answering(monkeypatch, "echo", "a library talks\n" + capsys.readouterr().out)
    found = probe.probe("xla")
    assert found.kind == "xla" and Hardware.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert [(one.name, one.total_bytes, one.free_bytes) for one in found.devices] == [
        ("TPU", 16 * 10**9, 15 * 10**9)
    ] * 2


def test_the_processor_shares_its_memory_among_its_devices(
    xla: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STUB_DEVICE", "CPU")
    assert xla.main() == 0
    answering(monkeypatch, "echo", capsys.readouterr().out)
    monkeypatch.setattr(probe.host, "linux_memory", lambda: (16 * 10**9, 8 * 10**9))
    found = probe.probe("xla").devices
    assert [(one.name, one.total_bytes, one.free_bytes) for one in found] == [
        ("CPU", 16 * 10**9, 2 * 10**9)
    ] * 4


def test_data_are_streamed_unless_asked_otherwise() -> None:
    machine, config = load_hardware("tpu-v4-8"), make_config()
    data = random_data(small_config(), shape=(1, 28, 28), train_size=4)
    place, why = placement_of(config, data, machine, world=4)
    assert place == "stream" and "compiled program" in why
    requested = make_config(data_placement="resident")
    assert placement_of(requested, data, machine, world=4)[0] == "resident"
