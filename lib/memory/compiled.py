"""Compiled models in a simulation: Inductor's own program runs, with kernels that do nothing.

Everything that decides what is stored is torch's: the graphs of TorchDynamo and AOTAutograd, the partitioner
that chooses what the backward pass recomputes, Inductor's fusion, order and reuse of buffers. Only the
kernels are neither compiled nor run, so no compiler of C++ or Triton is needed. Slow to import.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx
from torch._inductor import codecache, cpp_builder, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx

from lib.memory.simulation import replaced


def simulated_inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile `graph` for simulated tensors: a backend of torch.compile."""
    with _settings(), tempfile.TemporaryDirectory() as directory:
        compiler = (
            replaced(codecache, cache_dir=lambda: directory),
            replaced(AsyncCompile, cpp_pybinding=lambda *_: _no_kernel),
            replaced(cpu_vec_isa, valid_vec_isa_list=list),  # found by compiling a program for each
            replaced(cpp_builder, get_cpp_compiler=lambda: "g++", is_gcc=lambda: True),
            replaced(torch._C._dynamo.guards, **_ALLOCATIONS),
        )
        with contextlib.ExitStack() as stack:
            for each in compiler:
                stack.enter_context(each)
            compiled: Any = compile_fx(graph, list(inputs))
    return compiled  # type: ignore[no-any-return]


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    own = {"fx_graph_cache": False, "compile_threads": 1}
    # The backward pass is compiled with the forward pass: later its first call would do it.
    ahead = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    with torch._inductor.config.patch(own), torch._functorch.config.patch(ahead):
        yield


def _no_kernel(*_: Any) -> None:
    """Do nothing: a kernel between simulated tensors, which are allocated."""


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _view(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return base.as_strided(size, stride, base.storage_offset() + offset)


# Of Inductor's programs, which bypass torch's dispatcher and so a simulation.
_ALLOCATIONS = {"_empty_strided_cpu": _empty, "_reinterpret_tensor": _view}
