"""Questions as rows of numbers: bytes of the source, and what the two language models read and are to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lib.data.datasets.question_answering.key_values import Question
from lib.data.types import ArrayPart
from lib.nn import IGNORED

Row = list[int]
Ids = npt.NDArray[np.int32]


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]: ...


def cut(source: str, *, source_bytes: int) -> str:
    """The beginning of `source` that takes at most so many bytes of UTF-8."""
    return source.encode()[:source_bytes].decode(errors="ignore")


def pack(
    questions: Sequence[Question], encoders: Sequence[Encoder], *, anchor: str, source_bytes: int
) -> tuple[npt.NDArray[np.uint8], list[tuple[Ids, Ids]]]:
    """Sources as bytes (N, source_bytes), 0 after the end; for each encoder answers and whole texts.

    A whole text is the source, the anchor and the answer. Both are int32 (N, longest), IGNORED after the
    end. Sources are cut first, so that nobody sees more of them than the others.
    """
    sources = [cut(question.source, source_bytes=source_bytes) for question in questions]
    contents = np.zeros((len(questions), source_bytes), np.uint8)
    for row, source in enumerate(sources):
        content = source.encode()
        contents[row, : len(content)] = np.frombuffer(content, np.uint8)
    packed = []
    for encoder in encoders:
        between = encoder.encode(anchor)
        answers = [encoder.encode(question.answer) for question in questions]
        texts = [
            encoder.encode(source) + between + answer for source, answer in zip(sources, answers, strict=True)
        ]
        packed.append((_filled(answers), _filled(texts)))
    return contents, packed


def widen(ids_NL: Ids, width: int) -> Ids:
    """`ids_NL` with IGNORED up to `width` columns."""
    missing = width - ids_NL.shape[1]
    return np.pad(ids_NL, ((0, 0), (0, missing)), constant_values=IGNORED)


def part_of(contents: npt.NDArray[np.uint8], columns: Sequence[Ids]) -> ArrayPart:
    """Rows as `AnswerSpec` has them; the last columns are the next sample's source."""
    others = np.roll(contents, -1, axis=0).astype(np.int32)
    return ArrayPart(contents, np.concatenate([*columns, others], axis=1))


def _filled(rows: Sequence[Row]) -> Ids:
    longest = max(map(len, rows))
    return np.array([row + [IGNORED] * (longest - len(row)) for row in rows], np.int32)
