"""What a step costs: processor time and bytes of tensors that are alive, by the ways of differentiating."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from lib.config import Config
from lib.memory.live import LiveBytes
from models.looped.model import LoopedTransformer
from scripts.eqprop.subject import batch_of, loss_of, model_of
from train.training_data import Subject

REPEATS = 5
NEVER_SETTLES = 1e-30  # a tolerance at which all iterations are made


def step_seconds(models: Sequence[LoopedTransformer], subject: Subject, *, rows: int) -> list[float]:
    """Processor time of a gradient of each: the median of REPEATS rounds in which they take turns.

    Not wall time, which other programs take a part of.
    """
    inputs, targets = batch_of(subject, rows=rows)
    found: list[list[float]] = [[] for _ in models]
    for round_number in range(REPEATS + 1):
        for model, times in zip(models, found, strict=True):
            started = time.process_time()
            loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
            if round_number:  # the first one warms up
                times.append(time.process_time() - started)
    return [statistics.median(times) for times in found]


def peak_bytes(model: LoopedTransformer, subject: Subject, *, rows: int, train: bool = True) -> int:
    """The most that tensors take besides the weights while a gradient, or an evaluation, is computed."""
    inputs, targets = batch_of(subject, rows=rows)
    with LiveBytes() as live, torch.set_grad_enabled(train):
        loss = loss_of(model, inputs, targets)
        if train:
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
    model.zero_grad(set_to_none=True)
    return live.trace().peak_bytes  # type: ignore[no-any-return]


def fixed(config: Config, subject: Subject, *, iterations: int, **changes: Any) -> LoopedTransformer:
    """A model that makes `iterations` in every phase, free or under a force."""
    options = {"tolerance": NEVER_SETTLES, "max_iterations": iterations, "nudged_iterations": iterations}
    return model_of(config, subject, seed=1, **{**options, **changes})
