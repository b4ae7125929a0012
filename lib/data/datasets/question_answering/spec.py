"""Spec of questions for two frozen language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lib.data.types import InputDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of two frozen language models with the lengths of its questions in tokens.

    width: channels of its embedding. anchor: tokens between source and answer. answer_tokens, text_tokens: of
    the longest answer, and of the longest source with anchor and answer.
    """

    name: str
    vocab_size: int
    width: int
    anchor: tuple[int, ...]
    answer_tokens: int
    text_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSpec:
    """Questions that two frozen language models answer without seeing the sources.

    Inputs are int64 (N, source_bytes): the zero-padded bytes of a source. Targets are int64 (N, sum of
    `columns`).
    """

    input_dtype: ClassVar[InputDtype] = "int64"

    name: str
    source_bytes: int
    sides: tuple[Side, Side]
    synthetic: bool

    @property
    def vocab_size(self) -> int:
        """Number of byte values."""
        return 256

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (self.source_bytes,)

    @property
    def columns(self) -> tuple[int, ...]:
        """Widths of the targets: answer and whole text of each side, then another sample's source.

        Tokens are padded with IGNORED, bytes with 0.
        """
        tokens = (count for side in self.sides for count in (side.answer_tokens, side.text_tokens))
        return *tokens, self.source_bytes
