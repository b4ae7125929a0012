"""Spec of conversations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lib.data.types import ArrayPart, Indices, Part, TokensSpec, Unit
from lib.nn import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSpec(TokensSpec):
    """Conversations. Targets (N, T) are the next tokens of answers, IGNORED elsewhere; T is block_size.

    Inputs are (N, T) with `pad` after the end of each. Packed they are (N, 2, T): tokens, and the number of
    the conversation in its row that each belongs to, -1 for padding; a token may depend on its own one only.
    end: the token after an answer. bucketed: rows are cut after the last target of a micro-batch.
    """

    unit: Unit
    pad: int
    end: int
    packed: bool = False
    bucketed: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (2, self.block_size) if self.packed else (self.block_size,)

    def lengths(self, part: Part) -> Indices:
        """Return the number of tokens up to the last one with a target, of each row (N,)."""
        assert isinstance(part, ArrayPart)
        if part.targets.ndim == 1:  # not known: those of `lib.data.inputs.unlabelled`
            return np.full(part.size, self.block_size, np.int64)
        counts_NT = part.sample_targets != IGNORED
        lengths_N: Indices = self.block_size - counts_NT[:, ::-1].argmax(axis=1)
        return lengths_N
