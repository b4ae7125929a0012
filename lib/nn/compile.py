"""Compilation by torch.compile, with the toolkit's errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lib.devices.backend import is_out_of_memory
from lib.errors import ToolkitError
from lib.memory.simulation import simulated

# Programs of one function: for lengths of texts, shapes of matrices, groups of parameters. Beyond torch's
# limit of 8 it would run without the compiler, and only a warning would say so.
PROGRAMS = 256


@runtime_checkable
class CompilesPerIteration(Protocol):
    """A model iterated a variable number of times: one iteration is compiled instead of the whole."""

    def compile_steps(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Compile one iteration with `compiler`."""


def compiled_forward(model: nn.Module, wrapped: nn.Module) -> Callable[..., Any]:
    """Return the compiled forward of `wrapped`, which holds `model`, whole or per iteration."""
    if not isinstance(model, CompilesPerIteration):
        return compiled(wrapped)
    model.compile_steps(compiled)
    return wrapped


def replayed(model: nn.Module) -> Callable[..., Any]:
    """Compile `model` to CUDA graphs, with results that the next call does not overwrite.

    It overwrites the gradients of the one before, and has to find parameters, buffers and tensors that are
    attributes of modules at the same addresses. Raises ToolkitError in the second call, when the backward
    pass is compiled, too, where Inductor could not make graphs.
    """
    from torch._dynamo.utils import counters  # the compiler, which takes a second to load

    forward, calls = compiled(model, options={"triton.cudagraphs": True}), 0
    skipped = counters["inductor"]["cudagraph_skips"]

    def own(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and counters["inductor"]["cudagraph_skips"] > skipped:
            why = "Inductor skipped them; TORCH_LOGS=cudagraphs says why"
            raise ToolkitError("no CUDA graphs can be made", why=why, todo="set CONFIG_CUDA_GRAPHS=n")
        # So that the graph of the first step serves for all.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return tree_map_only(torch.Tensor, torch.clone, forward(*arguments, **named))

    return own


def compiled(model: Callable[..., Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile `model` by torch.compile with fixed shapes (the planner plans a single micro-batch size).

    options: of Inductor. Compilation happens in the first call, which raises ToolkitError if it fails.
    """
    backend: Any = "inductor"
    if simulated():
        from lib.memory.compiled import simulated_inductor as backend  # slow import

        options = None
    try:
        forward = torch.compile(model, dynamic=False, backend=backend, options=options)
    except RuntimeError as error:
        raise _compile_error(error) from error
    # Imported here because it loads the compiler, which takes a second.
    from torch._dynamo import config as limits
    from torch._dynamo.exc import TorchDynamoException

    limits.recompile_limit = max(limits.recompile_limit, PROGRAMS)

    def guarded(*arguments: Any, **named: Any) -> Any:
        try:
            return forward(*arguments, **named)
        except TorchDynamoException as error:
            if is_out_of_memory(error):
                raise
            raise _compile_error(error) from error

    return guarded


def _compile_error(error: Exception) -> ToolkitError:
    cause = getattr(error, "inner_exception", error)
    return ToolkitError(
        "torch.compile cannot run here",
        why=next(filter(None, str(cause).splitlines()), type(cause).__name__),
        todo="set CONFIG_COMPILE_MANUAL=y CONFIG_COMPILE_MODEL=n",
    )
