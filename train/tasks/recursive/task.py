"""Deep supervision of a model that improves its own answer, with adaptive computation time.

One optimizer step is one supervision step of every row. A row whose sample is finished takes the new sample
of that row; other new samples are dropped, so epochs are nominal. A sample continues from its latents,
whichever micro-batch or rank its row belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lib.config import Config
from lib.data.datasets.sudoku.spec import PuzzleSpec
from lib.data.loader import Batch
from lib.data.types import Spec
from lib.devices.base import Backend, send
from lib.nn import IGNORED
from lib.nn.cross_entropy import stablemax_cross_entropy
from lib.rng import key, mix
from train.tasks.base import (
    Figures,
    Forward,
    Sums,
    count_of,
    no_logits,
    refuse_label_smoothing,
    weighted_sum,
)

DATA = ("puzzles", (PuzzleSpec,))
SELECTS = "MODEL_LEARNS_RECURSIVELY"
HALT_WEIGHT = 0.5  # of the loss of the halting logit
FIRST_HALT = -5.0  # the initial halting logit of models/trm
_THOUGHT_FIELDS = ("logits", "halt", "y_BTD", "z_BTD")
_REPEATS = 2  # of an evaluation step, after which memory is constant
_FIELD_BITS = 20
_FIELD_MASK = (1 << _FIELD_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of train/tasks/recursive/Kconfig."""

    halt_max_steps: int
    halt_exploration: float
    eval_steps: int


def build(options: Options, spec: Spec, *, config: Config) -> Recursive:
    """Return the task. Raises ConfigError for label smoothing."""
    assert isinstance(spec, PuzzleSpec)
    refuse_label_smoothing(config, "cells")
    return Recursive(
        seed=config.seed,
        max_steps=options.halt_max_steps,
        exploration=options.halt_exploration,
        eval_steps=options.eval_steps,
    )


def fault(returned: Any, spec: Spec, *, rows: int) -> str:
    """Return the fault if a model did not return a `Thought`, else ""."""
    assert isinstance(spec, PuzzleSpec)
    missing = [name for name in _THOUGHT_FIELDS if not isinstance(getattr(returned, name, None), Tensor)]
    if missing:
        return f"which has no {', '.join(missing)}"
    return no_logits(returned.logits, (rows, *spec.input_shape), spec.vocab_size, padded=True)


def naive_loss(spec: Spec) -> float:
    """Return the loss of a uniform guess of each cell with the initial halting logit."""
    assert isinstance(spec, PuzzleSpec)
    return math.log(spec.vocab_size) + HALT_WEIGHT * math.log1p(math.exp(FIRST_HALT))


def figures(options: Options, _: Spec) -> Figures:
    """Return the names of the figures."""
    last, steps = options.eval_steps, range(1, options.eval_steps + 1)
    after = (f"exact_after_{step}" for step in steps if step & (step - 1) == 0 or step == last)
    return Figures(("loss", "accuracy", "exact_accuracy", *after))


def to_measure(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return cheaper options that need the same memory as `options`."""
    return {**options, "eval_steps": min(options["eval_steps"], _REPEATS)}


def thoughts(forward: Forward, inputs_BL: Tensor, steps: int) -> Iterator[Any]:
    """Yield the `Thought` after each of `steps` supervision steps."""
    thought = forward(inputs_BL)
    not_fresh_B = torch.zeros(len(inputs_BL), dtype=torch.bool, device=inputs_BL.device)
    yield thought
    for _ in range(1, steps):
        thought = forward(inputs_BL, thought.y_BTD, thought.z_BTD, not_fresh_B)
        yield thought


class Recursive:
    """Task of a model such as models/trm: tokens and latents to a `Thought`."""

    targets_per_sample = 1

    def __init__(self, *, seed: int, max_steps: int, exploration: float, eval_steps: int) -> None:
        """max_steps: per sample in training. exploration: share of rows with a minimum number of steps.

        eval_steps: per sample in evaluation.
        """
        self.carry = Carry()
        self._seed, self._max_steps, self._exploration = seed, max_steps, exploration
        self._eval_steps = eval_steps

    def training(self, forward: Forward, batch: Batch) -> Sums:
        """Return the loss. Metrics: accuracy of cells, rows that halt, and halted rows that are solved."""
        before = self.carry.selected()
        if before is None:
            inputs_BL, targets_BL = batch.inputs, batch.targets
            thought = forward(inputs_BL)
            steps_B = torch.ones_like(targets_BL[:, 0])
        else:
            fresh_B = before.halted_B
            inputs_BL = torch.where(fresh_B[:, None], batch.inputs, before.inputs_BL)
            targets_BL = torch.where(fresh_B[:, None], batch.targets, before.targets_BL)
            thought = forward(inputs_BL, before.y_BTD, before.z_BTD, fresh_B)
            steps_B = before.steps_B.masked_fill(fresh_B, 0) + 1
        loss_B, right_B, exact_B = _scores(thought.logits, targets_BL)
        halt_loss_B = F.binary_cross_entropy_with_logits(
            thought.halt, exact_B.to(thought.halt.dtype), reduction="none"
        )
        halted_B = (steps_B >= self._max_steps) | ((thought.halt.detach() > 0) & (self._max_steps > 1))
        minimum_B = self.carry.min_steps(
            seed=self._seed, limit=self._max_steps, probability=self._exploration
        )
        halted_B &= steps_B >= send(minimum_B, steps_B.device)
        self.carry.store(Rows(thought.y_BTD, thought.z_BTD, steps_B, halted_B, inputs_BL, targets_BL))
        found = {"accuracy": right_B, "halted": halted_B, "solved": halted_B & exact_B}
        metrics = {name: weighted_sum(values_B, batch) for name, values_B in found.items()}
        loss = weighted_sum(loss_B, batch) + HALT_WEIGHT * weighted_sum(halt_loss_B, batch)
        return Sums(loss, count_of(batch), metrics)

    def evaluation(self, forward: Forward, batch: Batch) -> Sums:
        """Run EVAL_STEPS steps. Exact: every cell is right; also reported after 1, 2, 4, ... steps."""
        assert batch.weights is not None
        weights_B, metrics = batch.weights, dict[str, Tensor]()
        for step, thought in enumerate(thoughts(forward, batch.inputs, self._eval_steps), start=1):
            loss_B, right_B, exact_B = _scores(thought.logits, batch.targets)
            if step & (step - 1) == 0 or step == self._eval_steps:
                metrics[f"exact_after_{step}"] = (exact_B * weights_B).sum()
        metrics["accuracy"] = (right_B * weights_B).sum()
        metrics["exact_accuracy"] = (exact_B * weights_B).sum()
        return Sums((loss_B * weights_B).sum(), weights_B.sum(), metrics)

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the figures; the loss is that of the cells after the last step."""
        first = {"samples": means["count"], "loss": means["loss"], "accuracy": means["accuracy"]}
        exact = {"exact_accuracy": means["exact_accuracy"]}
        return first | exact | {name: value for name, value in means.items() if "after" in name}

    def score(self, evaluation: Mapping[str, float]) -> float:
        """Return the exact accuracy."""
        return evaluation["exact_accuracy"]


class Rows(NamedTuple):
    """State of B rows; T tokens and D channels of the model, L cells of the sample."""

    y_BTD: Tensor
    z_BTD: Tensor
    steps_B: Tensor  # int64: supervision steps of the sample so far
    halted_B: Tensor  # bool: finished, the next sample replaces it
    inputs_BL: Tensor
    targets_BL: Tensor


class Carry:
    """Rows of one rank. The state of a step takes effect once it is committed."""

    def __init__(self) -> None:
        self._rows: Rows | None = None  # None before the first step
        self._stored: list[Rows] = []
        self._step = self._first = self._offset = self._count = self._padded = 0

    def seek(self, *, step: int, first: int, offset: int, count: int, rows: int) -> None:
        """Select `count` rows of optimizer step `step`, and padding up to `rows`.

        first: index of the first in the effective batch. offset: in this rank's part of it.
        """
        self._step, self._first, self._offset, self._count = step, first, offset, count
        self._padded = rows

    def selected(self) -> Rows | None:
        """Return the state of the selected rows; None before the first step."""
        if self._rows is None:
            return None
        if self._count == self._padded:
            return Rows(*(part[self._offset : self._offset + self._count] for part in self._rows))
        last = max(0, self._offset + self._count - 1)
        places = (self._offset + torch.arange(self._padded)).clamp(max=last)
        return Rows(*(part[send(places, part.device)] for part in self._rows))

    def store(self, rows: Rows) -> None:
        """Keep `rows`, without gradients and padding, for the next step."""
        self._stored.append(Rows(*(part[: self._count] for part in rows)))

    def min_steps(self, *, seed: int, limit: int, probability: float) -> Tensor:
        """Draw the minimum number of steps of each selected row: 2 to `limit`, or 0; int64, on the CPU.

        Non-zero with `probability`, as a function of (seed, step, row).
        """
        rows = np.arange(self._first, self._first + self._padded, dtype=np.int64)
        words = mix(mix(rows ^ key("halt", seed, self._step)))
        explores = (words & _FIELD_MASK) < probability * (1 << _FIELD_BITS)
        drawn = 2 + (((words >> _FIELD_BITS) & _FIELD_MASK) * (limit - 1) >> _FIELD_BITS)
        return torch.from_numpy(np.where(explores & (limit > 1), drawn, 0))

    def commit(self) -> None:
        """Keep the state that the step stored."""
        stored, self._stored = self._stored, []
        if stored:
            self._rows = stored[0] if len(stored) == 1 else Rows(*map(torch.cat, zip(*stored, strict=True)))

    def discard(self) -> None:
        """Discard the state of an abandoned step."""
        self._stored = []

    def gathered(self, backend: Backend) -> dict[str, Tensor] | None:
        """Gather all rows on the CPU of rank 0. Called by every rank."""
        if self._rows is None:
            return None
        count = len(self._rows.steps_B)
        (most,) = backend.all_reduce_max((count,))
        counts = [int(number) for number in backend.gather(torch.tensor(count))]
        found = dict[str, Tensor]()
        for name, part in zip(Rows._fields, self._rows, strict=True):
            filler = part.new_zeros(int(most) - count, *part.shape[1:])  # ranks gather tensors of one shape
            parts = backend.gather(torch.cat((part, filler)))
            if parts:
                found[name] = torch.cat([each[:own] for each, own in zip(parts, counts, strict=True)])
        return found

    def load(self, state: Mapping[str, Tensor] | None, backend: Backend, *, shares: Sequence[int]) -> None:
        """Load a `gathered` state; None: start anew.

        shares: rows of each rank. Raises ValueError for another number in all.
        """
        if state is None:
            self._rows = None
            return
        rows = Rows(**state)
        if len(rows.steps_B) != sum(shares):
            raise ValueError(f"{len(rows.steps_B)} rows of a carry, not {sum(shares)}")
        first = sum(shares[: backend.rank])
        own = slice(first, first + shares[backend.rank])
        self._rows = Rows(*(part[own].to(backend.device) for part in rows))


def _scores(logits_BLV: Tensor, targets_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return per row the mean loss of its cells, the share of right cells, and whether all are right."""
    counts_BL = targets_BL != IGNORED
    counts_B = counts_BL.sum(dim=1)
    loss_BL = stablemax_cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten()).view_as(targets_BL)
    right_BL = (logits_BLV.argmax(dim=2) == targets_BL) & counts_BL
    right_B = right_BL.sum(dim=1)
    return loss_BL.sum(dim=1) / counts_B.clamp(min=1), right_B / counts_B.clamp(min=1), right_B == counts_B
