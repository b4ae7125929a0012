"""The seam to devices: one process, one rank of several, what is said to torchrun, what errors mean."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.devices import backend, base
from lib.devices.base import Backend
from lib.errors import ToolkitError
from lib.nn.compile import compiled
from tests.support.fake_backend import FakeBackend

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The switches of the libraries, put back at the end."""
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    rounded, matmul = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.backends.cudnn.benchmark = benchmark
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.allow_tf32 = rounded
    torch.set_float32_matmul_precision(matmul)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("libraries")
def test_deterministic_algorithms_are_switched_on_and_off() -> None:
    backend.configure_numerics("fp32", deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    backend.configure_numerics("fp32", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("precision", "rounded"), [("bf16", True), ("fp32", False), ("fp16", True)])
def test_single_precision_is_single_throughout(precision: Any, rounded: bool) -> None:
    backend.configure_numerics(precision, deterministic=False)
    # Of all ways to ask, those that the compiler uses; the first fails where the switches contradict.
    assert torch.backends.cudnn.allow_tf32 is rounded
    assert torch.backends.cuda.matmul.allow_tf32 is rounded
    assert torch.backends.cudnn.conv.fp32_precision == ("tf32" if rounded else "none")


@pytest.mark.usefixtures("libraries")
def test_processors_are_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    backend.configure_threads("cpu", cpu_count=7, world=2)
    assert torch.get_num_threads() == 1, "what the user set is kept"
    monkeypatch.delenv("OMP_NUM_THREADS")
    backend.configure_threads("cuda", cpu_count=7, world=2)
    assert torch.get_num_threads() == 1
    backend.configure_threads("cpu", cpu_count=7, world=2)
    assert torch.get_num_threads() == 3
    backend.configure_threads("cpu", cpu_count=2, world=3)
    assert torch.get_num_threads() == 1


def test_a_compiler_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Dynamo is not supported on this Python\nand a second line")

    monkeypatch.setattr(torch, "compile", refuse)
    with pytest.raises(ToolkitError, match=r"cannot run here: Dynamo is not .* this Python; set CONFIG_"):
        compiled(nn.Linear(1, 1))


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], Callable[..., Any]]:
    """A compiled model whose compiler raises that error."""
    compile_model = torch.compile

    def failing(error: Exception) -> Callable[..., Any]:
        def compiler(*_: object) -> None:
            raise error

        monkeypatch.setattr(torch, "compile", lambda model, **_: compile_model(model, backend=compiler))
        return compiled(nn.Linear(1, 1))

    return failing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiler_that_fails_in_the_first_step_is_one_line(
    compiling: Callable[[Exception], Callable[..., Any]],
) -> None:
    forward = compiling(ValueError("\nno such instruction\nand a second line"))
    with pytest.raises(
        ToolkitError, match=r"^torch.compile cannot run here: no such instruction; set CONFIG_"
    ):
        forward(torch.zeros(1, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_memory_that_runs_out_while_compiling_is_left_to_the_loop(
    compiling: Callable[[Exception], Callable[..., Any]],
) -> None:
    with pytest.raises(RuntimeError) as caught:
        compiling(torch.OutOfMemoryError("CUDA out of memory"))(torch.zeros(1, 1))
    assert backend.is_out_of_memory(caught.value)


@pytest.mark.slow
def test_a_compiled_graph_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a constant of the graph cannot be pinned; by itself it is."""
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(base, "PINNED", {"cpu"})
    monkeypatch.setattr(Tensor, "pin_memory", pin)

    def weighted(values: Tensor) -> Tensor:
        return values * base.send(torch.tensor([1.0, 2.0]), values.device)

    found = torch.compile(weighted, backend="eager", fullgraph=True)(torch.ones(2))
    assert found.tolist() == [1.0, 2.0] and pinned == []
    assert weighted(torch.ones(2)).tolist() == [1.0, 2.0] and len(pinned) == 1


@pytest.mark.long
def test_a_machine_without_a_compiler_is_told(tmp_path: Path) -> None:
    code = (
        "import torch; from lib.nn.compile import compiled\n"
        "compiled(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))(torch.zeros(3, 2))"
    )
    places = {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | places,
        capture_output=True,
        text=True,
        check=False,
    )
    last = process.stderr.splitlines()[-1]
    assert (
        "torch.compile cannot run here: No working C++ compiler found" in last and "COMPILE_MODEL=n" in last
    )
