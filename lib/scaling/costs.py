"""What training a model costs on this machine: shallow models are measured, deeper ones lie on their line.

The blocks of a model are alike, and each adds as much as the one before.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from lib.data.types import TextSpec
from lib.memory.facts import model_facts
from lib.nn.cross_entropy import cross_entropy
from lib.nn.model_code import build_model
from lib.scaling.counts import training_flops
from lib.scaling.results import ScalingConfig

Shape: TypeAlias = tuple[str, int, int]  # architecture, d_model, n_layers
_TIMED_STEPS, _TIMED_ROWS = 5, 4


@dataclass(frozen=True, slots=True)
class Costs:
    """Of training on one token, on one thread, and of what a sample keeps for the backward pass."""

    seconds_per_token: float
    flops_per_token: float
    bytes_per_sample: float


def shape_of(config: ScalingConfig) -> Shape:
    """What the costs follow from."""
    return config.arch, config.d_model, config.n_layers


def costs_of(configs: Iterable[ScalingConfig], spec: TextSpec) -> dict[Shape, Costs]:
    """Of every shape among `configs`. Of an architecture and width only the two shallowest are measured."""
    widths: dict[tuple[str, int], dict[int, ScalingConfig]] = defaultdict(dict)
    for config in configs:
        widths[config.arch, config.d_model].setdefault(config.n_layers, config)
    found: dict[Shape, Costs] = {}
    for own in widths.values():
        shallow, *deep = sorted(own)
        found[shape_of(own[shallow])] = first = _measured(own[shallow], spec)
        if deep:
            second = _measured(own[deep[0]], spec)
            for layers in deep:
                share = (layers - shallow) / (deep[0] - shallow)
                found[shape_of(own[layers])] = _extended(first, second, share)
    return found


def _measured(config: ScalingConfig, spec: TextSpec) -> Costs:
    model, options = config.model()
    spec = replace(spec, block_size=config.n_seq)
    build = partial(build_model, model, options, spec, seed=config.seed)
    facts = model_facts(build, spec, name=model, train_size=1)
    return Costs(
        seconds_per_token=seconds_per_token(build, spec, rows=min(_TIMED_ROWS, config.batch_size)),
        flops_per_token=training_flops(build, block_size=config.n_seq),
        bytes_per_sample=facts.bytes_per_sample or 0,
    )


def _extended(first: Costs, second: Costs, share: float) -> Costs:
    """share: 0 is `first`, 1 is `second`. More blocks cost no less, whatever the timing says."""
    pairs = zip(astuple(first), astuple(second), strict=True)
    return Costs(*(start + share * max(end - start, 0.0) for start, end in pairs))


def seconds_per_token(build: Callable[[], nn.Module], spec: TextSpec, *, rows: int) -> float:
    """Of a processor, training on one thread, from five steps: while other programs run it is the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        tokens_BT = torch.zeros(rows, spec.block_size, dtype=torch.long)
        taken = []
        for _ in range(_TIMED_STEPS):
            started = time.process_time()
            loss_BT = cross_entropy(model(tokens_BT).flatten(0, 1), tokens_BT.flatten())
            torch.autograd.backward(loss_BT.mean())
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.process_time() - started)
    finally:
        torch.set_num_threads(threads)
    return sorted(taken)[_TIMED_STEPS // 2] / tokens_BT.numel()
