"""Layers of torch and of other packages in a model: what is converted, and what stays inexact, by trying."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lib.config import Config
from lib.data.types import Spec
from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain, configure_recomputation
from lib.nn.batch_norm import configure_norm
from lib.nn.dropout import key_stock_dropouts
from lib.nn.exactness import inexact_modules, recomputes_exactly
from lib.nn.model_code import ModelCode, build_model
from lib.plan.types import ModelFacts
from lib.units import some_of

GROUP = 2  # samples that are normalised together in the trial
MOST_FLOP, MOST_PARAMETERS = 2e11, 2e8  # of a trial: some seconds, and 1.6 GB


def with_trial(config: Config, spec: Spec, facts: ModelFacts) -> ModelFacts:
    """Return `facts` with what a trial finds about the layers of the configured model.

    Raises ConfigError where the model cannot be built or run, or where recomputing activations changes
    gradients.
    """
    rows = 2 * GROUP if facts.has_batchnorm else 2
    flop = 2 * rows * (facts.flop_per_sample or 0) / 3
    if (facts.parameters or 0) > MOST_PARAMETERS or flop > MOST_FLOP:
        untried = f"all layers (a trial takes {flop / 1e9:,.0f} GFLOP)"
        return dataclasses.replace(facts, inexact=(untried,))
    with ModelCode(config.model, torchs=True):
        model = build_model(config.model, config.model_options, spec, seed=config.seed)
        dropped, unfused = key_stock_dropouts(model)
        configure_recomputation(model, config.grad_checkpoint or "none")
        norms = configure_norm(model, norm_batch=GROUP if facts.has_batchnorm else 0, momentum=None)
        inputs = _inputs(spec, rows)
        layers, inputs = _inexact(model, inputs)
        chained = any(isinstance(module, Chain) for module in model.modules())
        if config.grad_checkpoint == "blocks" and not chained and not _recomputes(model, inputs):
            raise ConfigError(
                "CONFIG_GRAD_CHECKPOINT_BLOCKS=y is not possible",
                why=f"gradients of {type(model).__name__} change where its blocks are recomputed",
                todo="set CONFIG_GRAD_CHECKPOINT_NONE=y",
            )
    done = [getattr(model, "build_note", "")]
    done += [f"{norms} batch normalisations in groups"] * bool(norms and config.norm_batch)
    done += [f"{dropped} layers of dropout by sample"] * bool(dropped)
    done += [f"attention with dropout is not fused ({some_of(unfused)})"] * bool(unfused)
    return dataclasses.replace(facts, layers=", ".join(filter(None, done)), inexact=tuple(layers))


def _inexact(model: nn.Module, inputs: Tensor) -> tuple[list[str], Tensor]:
    """Return the layers of `model` that depend on the split, and the inputs in the precision of the trial."""
    try:
        with _by_default(torch.float64):
            return inexact_modules(model.double(), inputs), inputs
    except RuntimeError:  # a forward pass with a tensor of float32 by its name
        inputs = inputs.float() if inputs.is_floating_point() else inputs
        model.float()(inputs)  # an error in any precision is the model's
        return ["all layers (they do not run in double precision)"], inputs


def _recomputes(model: nn.Module, inputs: Tensor) -> bool:
    with _by_default(next(model.parameters()).dtype):
        return recomputes_exactly(model, inputs)


@contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors in `dtype`, such as the first state of a recurrent layer."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def _inputs(spec: Spec, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if spec.input_dtype == "float32":
        return torch.randn(rows, *spec.input_shape, generator=generator, dtype=torch.float64)
    known: Any = cast(Any, spec)
    inputs = torch.randint(0, known.vocab_size, (rows, *spec.input_shape), generator=generator)
    if hasattr(known, "pad"):  # every second text is shorter
        inputs[::2, -max(1, inputs.shape[1] // 4) :] = known.pad
    return inputs
