"""Parameter counts and training costs of models, without training them.

Parameters and FLOPs are counted on the meta device. Time and memory of the two shallowest models of a width
are measured and extrapolated linearly in depth, because all blocks of a model cost the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lib.data.types import TextSpec
from lib.memory.facts import model_facts
from lib.nn.cross_entropy import cross_entropy
from lib.nn.model_code import build_model
from lib.scaling.results import ScalingConfig

HEAD = "head"  # name of an output head that is not tied to the embedding
_TIMED_STEPS, _TIMED_ROWS = 5, 4

Shape: TypeAlias = tuple[str, int, int]  # architecture, d_model, n_layers


@runtime_checkable
class HasIdleParameters(Protocol):
    """A module, such as a mixture of experts, of which a token uses only some parameters."""

    def idle_parameters(self) -> int:
        """Return the number of parameters that a token does not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of parameters. nonembedding: without embeddings and head. active: of those, used per token."""

    total: int
    nonembedding: int
    active: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of training on one thread: time and FLOPs per token, activation bytes per sample."""

    seconds_per_token: float
    flops_per_token: float
    bytes_per_sample: float


def builder(config: ScalingConfig, spec: TextSpec) -> Callable[[], nn.Module]:
    """Return a function that builds the model of a run for texts of `spec`."""
    name, options = config.model()
    return partial(build_model, name, options, replace(spec, block_size=config.n_seq), seed=config.seed)


def count(build: Callable[[], nn.Module]) -> Counts:
    """Count the parameters of the model that `build` makes on torch's default device, "meta" here."""
    with torch.device("meta"):
        model = build()
    total = sum(parameter.numel() for parameter in model.parameters())
    outside = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    outside += [module for name, module in model.named_children() if name == HEAD]  # type: ignore[misc]
    embedded = {id(parameter): parameter.numel() for module in outside for parameter in module.parameters()}
    nonembedding = total - sum(embedded.values())
    idle = sum(each.idle_parameters() for each in model.modules() if isinstance(each, HasIdleParameters))
    return Counts(total=total, nonembedding=nonembedding, active=nonembedding - idle)


def training_flops(build: Callable[[], nn.Module], *, block_size: int) -> int:
    """Return the FLOPs of forward and backward per token: matrix products and attention, including the head.

    Elementwise operations are not counted.
    """
    with torch.device("meta"):
        model = build()
        tokens = torch.zeros(1, block_size, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    flops: int = counter.get_total_flops()
    return 3 * flops // block_size


def shape_of(config: ScalingConfig) -> Shape:
    """Return the part of a configuration that its costs depend on."""
    return config.arch, config.d_model, config.n_layers


def costs_of(configs: Iterable[ScalingConfig], spec: TextSpec) -> dict[Shape, Costs]:
    """Return the costs of every shape; per architecture and width only the two shallowest are measured."""
    widths: dict[tuple[str, int], dict[int, ScalingConfig]] = defaultdict(dict)
    for config in configs:
        widths[config.arch, config.d_model].setdefault(config.n_layers, config)
    costs: dict[Shape, Costs] = {}
    for by_depth in widths.values():
        shallow, *deeper = sorted(by_depth)
        costs[shape_of(by_depth[shallow])] = first = _measure(by_depth[shallow], spec)
        second = _measure(by_depth[deeper[0]], spec) if deeper else first
        pairs = list(zip(astuple(first), astuple(second), strict=True))
        for layers in deeper:
            # The line through both never falls, whatever timing says.
            distance = (layers - shallow) / (deeper[0] - shallow)
            extended = (start + distance * max(end - start, 0.0) for start, end in pairs)
            costs[shape_of(by_depth[layers])] = Costs(*extended)
    return costs


def _measure(config: ScalingConfig, spec: TextSpec) -> Costs:
    build, spec = builder(config, spec), replace(spec, block_size=config.n_seq)
    return Costs(
        seconds_per_token=seconds_per_token(build, spec, rows=min(_TIMED_ROWS, config.batch_size)),
        flops_per_token=training_flops(build, block_size=config.n_seq),
        bytes_per_sample=model_facts(build, spec, name=config.arch, train_size=1).bytes_per_sample or 0,
    )


def seconds_per_token(build: Callable[[], nn.Module], spec: TextSpec, *, rows: int) -> float:
    """Return the median CPU seconds per token of five training steps on one thread.

    CPU time, because wall time would depend on other programs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens_BT = torch.zeros(rows, spec.block_size, dtype=torch.long)
        seconds = []
        for _ in range(_TIMED_STEPS):
            started = time.process_time()
            loss_BT = cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
            torch.autograd.backward(loss_BT.mean())
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - started)
    finally:
        torch.set_num_threads(threads)
    return sorted(seconds)[_TIMED_STEPS // 2] / tokens_BT.numel()
