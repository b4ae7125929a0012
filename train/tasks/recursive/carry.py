"""What each row of a batch keeps from one optimizer step to the next.

In deep supervision a sample stays for several steps, and goes on from where the one before left it. The
place where it stays is its row of the effective batch, whatever micro-batch or rank that row falls to:
one shared by all micro-batches would make each of them the next step of another's samples.
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
    """What rows keep. B rows; T tokens and D channels of the model, L cells of the sample."""

    y_BTD: Tensor
    z_BTD: Tensor
    steps_B: Tensor  # int64: supervision steps that the sample has had
    halted_B: Tensor  # bool: it is done, and the next sample takes its place
    inputs_BL: Tensor
    targets_BL: Tensor


class Carry:
    """The rows of one rank. What a step leaves counts from the next one on, once it is committed."""

    def __init__(self) -> None:
        self._rows: Rows | None = None  # None before the first step
        self._left: list[Rows] = []
        self._step = self._first = self._offset = self._count = 0

    def seek(self, *, step: int, first: int, offset: int, count: int) -> None:
        """What follows is about `count` rows of optimizer step `step`.

        first: the first of them in the effective batch. offset: in this rank's part of it.
        """
        self._step, self._first, self._offset, self._count = step, first, offset, count

    def taken(self) -> Rows | None:
        """What these rows kept; None where nothing was before."""
        if self._rows is None:
            return None
        return Rows(*(part[self._offset : self._offset + self._count] for part in self._rows))

    def leave(self, rows: Rows) -> None:
        """Keep `rows`, without gradients, for the next step."""
        self._left.append(rows)

    def least_steps(self, *, seed: int, most: int, probability: float) -> Tensor:
        """How many steps each of these rows is to be given: 2 to `most`, or 0 for any; int64, on the CPU.

        Drawn with `probability`, as a function of (seed, step, row).
        """
        rows = np.arange(self._first, self._first + self._count, dtype=np.int64)
        words = mix(mix(rows ^ key("halt", seed, self._step)))
        explores = (words & _FIELD_MASK) < probability * (1 << _FIELD_BITS)
        drawn = 2 + (((words >> _FIELD_BITS) & _FIELD_MASK) * (most - 1) >> _FIELD_BITS)
        return torch.from_numpy(np.where(explores & (most > 1), drawn, 0))

    def commit(self) -> None:
        """The step is made: what it left counts."""
        left, self._left = self._left, []
        if left:
            self._rows = left[0] if len(left) == 1 else Rows(*map(torch.cat, zip(*left, strict=True)))

    def discard(self) -> None:
        """The step is made again, from its beginning."""
        self._left = []

    def gathered(self, backend: Backend) -> dict[str, Tensor] | None:
        """The rows of the effective batch on the CPU of rank 0. Every rank has to call it."""
        if self._rows is None:
            return None
        parts = [backend.gather(part) for part in self._rows]
        return {
            name: torch.cat(part) if len(part) > 1 else part[0]
            for name, part in zip(Rows._fields, parts, strict=True)
            if part
        }

    def load(self, state: Mapping[str, Tensor] | None, backend: Backend, *, share: int) -> None:
        """Go on from what was `gathered`; from the start where that is None. share: rows of each rank.

        Raises ValueError where it has another number of rows.
        """
        if state is None:
            self._rows = None
            return
        rows = Rows(**state)
        if len(rows.steps_B) != share * backend.world:
            raise ValueError(f"{len(rows.steps_B)} rows of a carry, not {share * backend.world}")
        own = slice(backend.rank * share, (backend.rank + 1) * share)
        self._rows = Rows(*(part[own].to(backend.device) for part in rows))
