"""TPUs by torch_tpu, as far as they can be known without any: a stand-in says what it was asked."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lib.devices import accelerators, probe
from lib.devices.backend import open_backend
from lib.devices.base import Backend
from lib.errors import PlanError
from tests.support.stubbed import TPU_STUB, asked_for_in_a_step, job_on
from tests.support.training import largest_difference, trained

ROOT = Path(__file__).resolve().parents[3]
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
PLAYED = (
    *("current_accelerator", "is_available", "device_count", "get_memory_info"),
    *("max_memory_allocated", "synchronize", "empty_cache"),
)


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """lib.devices.tpu on the stand-in; what that puts in torch is taken out again."""
    for name in PLAYED:
        monkeypatch.setattr(torch.accelerator, name, getattr(torch.accelerator, name))
    monkeypatch.setattr(torch, "tpu", None, raising=False)
    monkeypatch.setenv(AUTOLOAD, "0")
    monkeypatch.syspath_prepend(str(TPU_STUB))
    yield importlib.import_module("lib.devices.tpu")
    for name in ("lib.devices.tpu", "torch_tpu"):
        sys.modules.pop(name, None)


def calls_of_stub() -> list[str]:
    requested: list[str] = sys.modules["torch_tpu"].CALLS  # type: ignore[attr-defined]
    return requested


# Training


def test_it_is_loaded_when_training_opens_it_and_not_before(tpu: ModuleType) -> None:
    assert "torch_tpu" not in sys.modules
    backend = open_backend("tpu", world=1)
    assert type(backend) is tpu.TpuBackend and calls_of_stub() == ["load", "device"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "there"), [("lib", "False"), ("sys", "True")])
def test_torch_loads_it_by_itself_unless_the_toolkit_is_there_first(first: str, there: str) -> None:
    code = f"import {first}, torch, sys; print('torch_tpu' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(TPU_STUB)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == there


def test_a_step_is_as_on_a_gpu(tpu: ModuleType) -> None:
    job = job_on(tpu.TpuBackend("tpu"), 8, 8, 8)
    assert asked_for_in_a_step(job, calls_of_stub()) == ["update"]


def test_nothing_but_where_it_is_computed_differs(tpu: ModuleType) -> None:
    settings: dict[str, Any] = {"ema": True, "ema_decay": 0.5, "eval_interval_steps": 1}
    there = trained(job_on(tpu.TpuBackend("tpu"), 8, 8, 4, **settings))
    assert largest_difference(there, trained(job_on(Backend("cpu"), 8, 8, 4, **settings))) == 0


def test_what_is_saved_comes_to_the_host_first(tpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, fetched = tpu.TpuBackend("tpu"), []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: fetched.append(tensor) or tensor)
    backend.to_host({"a": [torch.ones(1), 2], "b": (torch.ones(1),)})
    assert len(fetched) == 2


def test_the_clock_and_the_memory_are_those_of_the_accelerator(tpu: ModuleType) -> None:
    backend = tpu.TpuBackend("tpu")
    calls_of_stub().clear()
    backend.synchronize()
    backend.release_memory()
    assert backend.peak_memory_bytes() == 10**9
    assert calls_of_stub() == ["synchronize", "empty cache", "peak"]


def test_processes_talk_by_what_torch_has_for_the_device(
    tpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which torch_tpu registers by a name of its own; the stand-in's device is the processor, with gloo."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
    for name, value in ({"MASTER_ADDR": "127.0.0.1"} | variables).items():
        monkeypatch.setenv(name, value)
    requested: list[str] = []
    begin = dist.init_process_group

    def noted(name: str, **options: Any) -> None:
        requested.append(name)
        begin("gloo", **options)

    monkeypatch.setattr(dist, "init_process_group", noted)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cpu", "tpu_dist")
    backend = open_backend("tpu", world=None)
    monkeypatch.undo()
    assert isinstance(backend, tpu.DistributedTpuBackend) and requested == ["tpu_dist"]
    try:
        wrapped = backend.wrap(torch.nn.Linear(2, 2), share_buffers=True)
        assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    finally:
        backend.close()


# What there is


def machine(folder: Path, *devices: tuple[str, str]) -> Path:
    """The PCI devices of a machine, by vendor and number, as Linux shows them."""
    for index, (vendor, number) in enumerate(devices):
        place = folder / f"0000:00:0{index}.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "device").write_text(f"{number}\n")
    (folder / "unreadable").mkdir(parents=True)
    return folder


@pytest.fixture
def tpu_vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a TPU and torch_tpu."""
    found = machine(tmp_path / "pci", ("0x8086", "0x1237"), ("0x1ae0", "0x0042"), ("0x1ae0", "0x0063"))
    monkeypatch.setattr(accelerators, "PCI_DEVICES", found)
    monkeypatch.syspath_prepend(str(TPU_STUB))
    monkeypatch.setenv("PYTHONPATH", str(TPU_STUB))


@pytest.mark.parametrize(
    "devices",
    [
        (),
        (("0x1ae0", "0x0042"),),  # a network card of Google's, which its machines without a TPU have, too
        (("0x10de", "0x0063"),),  # of another vendor
    ],
)
def test_without_a_tpu_nothing_is_asked(
    devices: tuple[tuple[str, str], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "PCI_DEVICES", machine(tmp_path, *devices))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: pytest.fail("asked for the package"))
    with pytest.raises(
        PlanError, match=r"^CONFIG_DEVICE_TPU is not possible.*no PCI device here is a TPU .*AUTO=y$"
    ):
        probe.probe("tpu")


@pytest.mark.usefixtures("tpu_vm")
@pytest.mark.parametrize("missing", ["torch_tpu", "libtpu"])
def test_without_a_package_it_is_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(
        PlanError, match=f"^CONFIG_DEVICE_TPU is not possible.*: {missing} is not installed; inst"
    ):
        probe.probe("tpu")


@pytest.mark.usefixtures("tpu_vm")
@pytest.mark.parametrize(
    ("torch_version", "fits"),
    [("2.10.2", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.15.0", True), ("2.15.1", False)],
)
def test_the_torch_must_be_in_the_range_that_the_package_names(
    torch_version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = accelerators.metadata.version
    monkeypatch.setattr(
        accelerators.metadata, "version", lambda name: torch_version if name == "torch" else there(name)
    )
    monkeypatch.setitem(accelerators.COMMANDS, "tpu", ("sh", "-c", "echo was asked >&2; exit 1"))
    why = (
        "was asked"
        if fits
        else f"torch is {torch_version}, and torch_tpu 0.2.0 requires torch>=2.11.0,<=2.15"
    )
    with pytest.raises(PlanError) as refused:
        probe.probe("tpu")
    assert why in str(refused.value)


@pytest.mark.usefixtures("tpu_vm")
def test_a_package_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accelerators.COMMANDS, "tpu", ("sleep", "600"))
    monkeypatch.setattr(accelerators, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(PlanError, match=r"torch_tpu did not answer within 0.1 s; end what is using"):
        probe.probe("tpu")


@pytest.mark.slow
@pytest.mark.usefixtures("tpu_vm")
def test_the_devices_and_their_environment_are_those_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_DEVICES", "2")
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", "1,2,1")
    found = probe.probe("tpu")
    assert found.kind == "tpu"
    assert [(one.name, one.total_bytes, one.free_bytes) for one in found.devices] == [
        ("TPU v5e", 16 * 10**9, 15 * 10**9)
    ] * 2
    variables = accelerators.launch_variables("tpu", processes=2)
    assert variables == {"TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:9000,localhost:9001"}
    assert accelerators.launch_variables("cuda", processes=2) == {}


def test_a_device_that_does_not_tell_its_memory_is_an_error(
    tpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tpu.load()
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    with pytest.raises(SystemExit, match="does not tell how much memory"):
        tpu.main([])


def test_the_environment_is_made_without_taking_the_devices(
    tpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    assert tpu.main(["launch", "2"]) == 0
    assert calls_of_stub() == ["launch environment of 2 on 1"]
    addresses = "TORCH_TPU_SLICEBUILDER_ADDRESSES=localhost:9000,localhost:9001"
    assert capsys.readouterr().out == f"{addresses} TORCH_TPU_TOPOLOGY=2,2,1\n"
