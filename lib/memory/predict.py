"""Predicted peak device memory of training any torch module, without the device.

`make plan` uses train/planning/memory_estimate.py, which also knows data, tasks and parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.memory.live import CUDA_GRANULARITY, STEPS, LiveBytes, Trace, add_state, watch_gradients
from lib.memory.simulation import simulation
from lib.plan.types import Kind, Precision


def predict_peak(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor],
    *,
    micro_batch: int,
    precision: Precision = "bf16",
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    accumulation: int = 1,
    device: Kind = "cuda",
) -> Trace:
    """Simulate two optimizer steps of a model with fake tensors, and count every byte.

    build: makes the model. Weights computed from the values of other tensors (`.item()`) are not supported.
    loss: of the model and the number of samples, makes a batch (`torch.empty`, `torch.zeros`) and returns
        the scalar to be minimised.
    micro_batch, accumulation: samples per pass, and passes per update.
    precision: of matrix products; weights and the optimizer's state are as `build` and `optimizer` make them.

    `peak_bytes` of the result predicts torch.cuda.max_memory_allocated() for these steps;
    a device needs more than that (`lib.plan.fitting.predicted`).

    Raises ConfigError for an unsupported argument.
    """
    _check(build, precision, {"micro_batch": micro_batch, "accumulation": accumulation})
    granularity = 1 if device == "cpu" else CUDA_GRANULARITY
    live = LiveBytes(granularity=granularity)
    with simulation(device), live:
        model = build().train()
        live.add([*model.parameters(), *model.buffers()], "parameters")
        watch_gradients(model, live)
        updates = optimizer(model.parameters())
        for _ in range(STEPS):
            training_step(lambda: loss(model, micro_batch), updates, live, precision, accumulation)
    return live.trace()


def training_step(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    live: LiveBytes,
    precision: Precision,
    accumulation: int = 1,
) -> list[int]:
    """Run an optimizer step of simulated tensors; categorize its activations and the optimizer's state.

    Returns the number of events before the last forward pass, the last backward pass and the update, and at
    the end.
    """
    marks: list[int] = []
    for _ in range(accumulation):
        marks = [live.mark()]
        with _autocast(precision):
            value = loss()
        live.name_the_rest("activations")
        marks.append(live.mark())
        value.backward()  # type: ignore[no-untyped-call]
        del value
    marks.append(live.mark())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    add_state(optimizer, live)
    live.name_since(marks[-1], "update")
    return [*marks, live.mark()]


def _check(build: object, precision: str, counts: Mapping[str, int]) -> None:
    if isinstance(build, nn.Module):
        raise ConfigError(
            "predict_peak takes what makes a model, not a model",
            why="its weights are there already, and would not be counted",
            todo="pass a function without arguments that returns it",
        )
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise ConfigError(f"precision={precision!r} is not predicted for", todo=f"use one of {known}")
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name}={count} trains nothing", todo="use 1 or more")


def _autocast(precision: Precision) -> contextlib.AbstractContextManager[object]:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16 if precision == "bf16" else torch.float16)
