"""What must be known of questions for two frozen language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two frozen language models: what it takes for tokens, and what is asked of it in them.

    width: channels of its embedding. anchor: the tokens between a source and the answer.
    answer_tokens, text_tokens: of the longest answer, and of the longest source, anchor and answer.
    """

    name: str
    vocab_size: int
    width: int
    anchor: tuple[int, ...]
    answer_tokens: int
    text_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """Questions about sources, to be answered by two frozen language models that do not see the sources.

    Inputs are int64 (N, source_bytes): the bytes of a source, and 0 after its end. Targets are int64
    (N, sum of `columns`).
    """

    name: str
    source_bytes: int
    sides: tuple[Side, Side]
    synthetic: bool

    @property
    def vocab_size(self) -> int:
        """Bytes there are."""
        return 256

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return (self.source_bytes,)

    @property
    def input_dtype(self) -> Literal["int64"]:
        """Of what a model is given."""
        return "int64"

    @property
    def columns(self) -> tuple[int, ...]:
        """Of the targets: for each side the answer and the whole text, then the source of another sample.

        Tokens are IGNORED after their end, bytes 0.
        """
        tokens = (count for side in self.sides for count in (side.answer_tokens, side.text_tokens))
        return *tokens, self.source_bytes
