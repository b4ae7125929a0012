"""State of the rows of the effective batch between optimizer steps, for deep supervision.

A sample stays in its row for several steps and continues from its latents, whichever micro-batch or rank the
row belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lib.devices.base import Backend
from lib.rng import key, mix

_FIELD_BITS = 20
_FIELD_MASK = (1 << _FIELD_BITS) - 1


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
        self._step = self._first = self._offset = self._count = 0

    def seek(self, *, step: int, first: int, offset: int, count: int) -> None:
        """Select `count` rows of optimizer step `step`.

        first: index of the first in the effective batch. offset: in this rank's part of it.
        """
        self._step, self._first, self._offset, self._count = step, first, offset, count

    def selected(self) -> Rows | None:
        """Return the state of the selected rows; None before the first step."""
        if self._rows is None:
            return None
        return Rows(*(part[self._offset : self._offset + self._count] for part in self._rows))

    def store(self, rows: Rows) -> None:
        """Keep `rows`, without gradients, for the next step."""
        self._stored.append(rows)

    def min_steps(self, *, seed: int, limit: int, probability: float) -> Tensor:
        """Draw the minimum number of steps of each selected row: 2 to `limit`, or 0; int64, on the CPU.

        Non-zero with `probability`, as a function of (seed, step, row).
        """
        rows = np.arange(self._first, self._first + self._count, dtype=np.int64)
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
        parts = [backend.gather(part) for part in self._rows]
        return {
            name: torch.cat(part) if len(part) > 1 else part[0]
            for name, part in zip(Rows._fields, parts, strict=True)
            if part
        }

    def load(self, state: Mapping[str, Tensor] | None, backend: Backend, *, share: int) -> None:
        """Load a `gathered` state; None: start anew.

        share: rows per rank. Raises ValueError for other sizes.
        """
        if state is None:
            self._rows = None
            return
        rows = Rows(**state)
        if len(rows.steps_B) != share * backend.world:
            raise ValueError(f"{len(rows.steps_B)} rows of a carry, not {share * backend.world}")
        own = slice(backend.rank * share, (backend.rank + 1) * share)
        self._rows = Rows(*(part[own].to(backend.device) for part in rows))
