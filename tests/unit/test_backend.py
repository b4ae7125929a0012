"""The seam to devices: one process, one rank of several, what is said to torchrun, what errors mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lib import backend
from lib.backend import Backend, FakeBackend
from lib.errors import ToolkitError

ROOT = Path(__file__).resolve().parents[2]


def test_one_process_is_its_own_group() -> None:
    alone, model, tensor = Backend("cpu"), nn.Linear(2, 2), torch.arange(3.0)
    assert (alone.rank, alone.world, alone.is_main, alone.device) == (0, 1, True, torch.device("cpu"))
    assert alone.wrap(model, share_buffers=True) is model
    alone.all_reduce_sum(tensor)
    assert tensor.tolist() == [0, 1, 2]
    assert alone.all_reduce_max((1, 2.5)) == [1, 2.5]
    assert alone.broadcast({"a": 1}) == {"a": 1}
    assert alone.peak_memory_bytes() is None
    with alone.without_gradient_sync(model):
        alone.synchronize()
        alone.release_memory()
    alone.close()


def test_a_fake_rank_records_its_collectives() -> None:
    rank = FakeBackend(rank=2, world=4)
    assert not rank.is_main and FakeBackend(rank=0, world=4).is_main
    rank.all_reduce_sum(torch.zeros(2, 3))
    assert rank.all_reduce_max((1.0, 0.0)) == [1.0, 0.0] and rank.broadcast("x") == "x"
    assert rank.calls == ["sum(2, 3)", "max(2)", "broadcast"]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_precision_is_that_of_the_forward_pass(precision: Any, dtype: torch.dtype) -> None:
    layer, cpu = nn.Linear(2, 2), Backend("cpu")
    with cpu.autocast(precision):
        assert layer(torch.zeros(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32
    assert cpu.loss_scaler(precision).is_enabled() == (precision == "fp16")


def test_one_process_needs_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert type(backend.open_backend("cpu", world=1)) is Backend


def test_as_many_processes_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(AssertionError, match="the plan is for 2 processes, 3 were started"):
        backend.open_backend("cpu", world=2)


def test_launching_hands_over_the_plan_and_shares_out_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):
        """In place of this process being replaced."""

    called: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        called.append((path, arguments, environment))
        raise Replaced

    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "execve", execve)
    plan = {"plan": {"world": 2}, "run": None}
    with pytest.raises(Replaced):
        backend.launch(plan, world=2, cpu_count=9, arguments=["--runs", "elsewhere", "train"])
    (path, arguments, environment), *_ = called
    assert path == arguments[0] == sys.executable
    assert arguments[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    assert arguments[4:] == ["--nproc-per-node=2", "-m", "train", "--runs", "elsewhere", "train"]
    assert environment["OMP_NUM_THREADS"] == "4"
    assert backend.launched_plan() is None
    monkeypatch.setenv("ANNEAL_LAUNCH", environment["ANNEAL_LAUNCH"])
    assert backend.launched_plan() == plan == json.loads(environment["ANNEAL_LAUNCH"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pytest.raises(Replaced):
        backend.launch(plan, world=2, cpu_count=1, arguments=[])
    assert called[1][2]["OMP_NUM_THREADS"] == "3", "what the user set is kept"


def test_a_worker_ends_with_its_status_and_all_it_said() -> None:
    code = (
        "import atexit; from lib.backend import end_process\n"
        "atexit.register(lambda: print('cleaned up'))\n"
        "print('said', end='')\nend_process(7)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout) == (7, "said")


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The switches of the libraries, put back at the end."""
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("libraries")
def test_deterministic_algorithms_are_switched_on_and_off() -> None:
    backend.use_deterministic_algorithms(False)
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    backend.use_deterministic_algorithms(True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"


def test_a_compiler_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Dynamo is not supported on this Python\nand a second line")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(ToolkitError, match=r"cannot run here: Dynamo is not .* this Python; set CONFIG_"):
        backend.compiled(nn.Linear(1, 1))
