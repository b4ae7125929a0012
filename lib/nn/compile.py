"""Compilation by torch.compile, with the toolkit's errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lib.devices.backend import is_out_of_memory
from lib.errors import CompileError, ToolkitError
from lib.memory.simulation import simulated

# Programs of a function: for lengths of texts, shapes of matrices, groups of parameters. Torch has 8.
RECOMPILE_LIMIT = 256


@runtime_checkable
class CompilesPerIteration(Protocol):
    """A model iterated a variable number of times: one iteration is compiled instead of the whole."""

    def compile_steps(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Compile one iteration with `compiler`."""


def compiled_forward(model: nn.Module, wrapped: nn.Module, *, by_block: bool = False) -> Callable[..., Any]:
    """Return the compiled forward of `wrapped`, which holds `model`: whole, by block or by iteration.

    by_block: each block of `model` is compiled in place, and equal blocks share a program (regional
    compilation). A copy of such a model is not compiled.
    """
    if isinstance(model, CompilesPerIteration):
        model.compile_steps(compiled)
        return wrapped
    if not by_block:
        return compiled(wrapped)
    from lib.distributed.fsdp import blocks_of  # imports more than other runs need

    def compile_blocks(**settings: Any) -> nn.Module:
        from torch._dynamo import config

        with config.patch(wrap_top_frame=True):  # else a block of torch's own class would not be compiled
            for block in blocks_of(model):
                block.compile(**settings)
        return wrapped

    return _guarded(compile_blocks)


def cuda_graph_forward(model: nn.Module) -> Callable[..., Any]:
    """Compile `model` to CUDA graphs, with results that the next call does not overwrite.

    A call overwrites the gradients of the one before, and has to find parameters, buffers and tensors that
    are attributes of modules at the same addresses. Raises ToolkitError where Inductor did not make graphs
    in an earlier call; of a backward pass that is known only afterwards.
    """
    from torch._dynamo.utils import counters  # the compiler, which takes a second to load

    forward = compiled(model, options={"triton.cudagraphs": True})
    skipped = counters["inductor"]["cudagraph_skips"]

    def own(*arguments: Any, **named: Any) -> Any:
        if counters["inductor"]["cudagraph_skips"] > skipped:
            why = "Inductor skipped them; TORCH_LOGS=cudagraphs says why"
            raise ToolkitError("no CUDA graphs can be made", why=why, todo="set CONFIG_CUDA_GRAPHS=n")
        # So that the graph of the first step serves for all.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return tree_map_only(torch.Tensor, torch.clone, forward(*arguments, **named))

    return own


def release_programs() -> None:
    """Free all compiled programs, and the memory of CUDA graphs. What is called again is compiled again."""
    from torch._dynamo import reset

    reset()


def compiled(model: Callable[..., Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile `model` by torch.compile with fixed shapes (the planner plans a single micro-batch size).

    options: of Inductor. Compilation happens in the first call, which raises CompileError if it fails.
    """
    options = None if simulated() else options
    return _guarded(partial(torch.compile, model, options=options))


def _guarded(compile_it: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """Return what `compile_it` makes with settings of torch.compile, with the toolkit's errors."""
    backend: Any = "inductor"
    if simulated():
        from lib.memory.compiled import simulated_inductor as backend  # slow import
    try:
        forward = compile_it(dynamic=False, backend=backend)
    except RuntimeError as error:
        raise _compile_error(error) from error
    # Imported here because it loads the compiler, which takes a second.
    from torch._dynamo import config as limits
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
    # Else a function would run without the compiler from then on, and only a warning would say so.
    limits.fail_on_recompile_limit_hit = True

    def guarded(*arguments: Any, **named: Any) -> Any:
        try:
            return forward(*arguments, **named)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            if is_out_of_memory(error):
                raise
            raise _compile_error(error) from error

    return guarded


def _compile_error(error: Exception) -> CompileError:
    cause = getattr(error, "inner_exception", error)
    return CompileError(
        "torch.compile cannot run here",
        why=next(filter(None, str(cause).splitlines()), type(cause).__name__),
        todo="set CONFIG_COMPILE_MANUAL=y CONFIG_COMPILE_MODEL=n",
    )
