"""Spec of conversations."""

from __future__ import annotations

from dataclasses import dataclass

from lib.data.types import TokensSpec, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSpec(TokensSpec):
    """Conversations. Targets (N, T) are the next tokens of answers, IGNORED elsewhere; T is block_size.

    Inputs are (N, T) with `pad` after the end of each. Packed they are (N, 2, T): tokens, and the number of
    the conversation in its row that each belongs to, -1 for padding; a token may depend on its own one only.
    end: the token after an answer.
    """

    unit: Unit
    pad: int
    end: int
    packed: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (2, self.block_size) if self.packed else (self.block_size,)
