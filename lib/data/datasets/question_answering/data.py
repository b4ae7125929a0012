"""Questions for two frozen language models, each in its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lib.data.datasets.files import DataLocation
from lib.data.datasets.question_answering import huggingface
from lib.data.datasets.question_answering.questions import (
    ANCHOR,
    PUBLISHED,
    PUBLISHED_ANCHOR,
    TEST_SIZE,
    TRAIN_SIZE,
    Question,
    questions,
    read_published,
)
from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.tokenizers.bpe import learned
from lib.data.tokenizers.byte_char import ByteTokenizer
from lib.data.types import ArrayPart, Dataset
from lib.errors import ConfigError
from lib.nn import IGNORED

Row = list[int]
Ids = npt.NDArray[np.int32]


class Encoder(Protocol):
    """A tokenizer that only encodes."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        ...


def truncated(source: str, *, source_bytes: int) -> str:
    """Return the beginning of `source` within `source_bytes` bytes of UTF-8."""
    return source.encode()[:source_bytes].decode(errors="ignore")


def pack(
    questions: Sequence[Question], encoders: Sequence[Encoder], *, anchor: str, source_bytes: int
) -> tuple[npt.NDArray[np.uint8], list[tuple[Ids, Ids]]]:
    """Return sources as zero-padded bytes (N, source_bytes); for each encoder answers and whole texts.

    A whole text is source, anchor and answer. Both are int32 (N, longest), padded with IGNORED. Sources are
    truncated first, so that all see the same.
    """
    sources = [truncated(question.source, source_bytes=source_bytes) for question in questions]
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


def part_of(contents: npt.NDArray[np.uint8], columns: Sequence[Ids]) -> ArrayPart:
    """Return rows as in `AnswerSpec`; the last columns are the next sample's source."""
    others = np.roll(contents, -1, axis=0).astype(np.int32)
    return ArrayPart(contents, np.concatenate([*columns, others], axis=1))


def _filled(rows: Sequence[Row]) -> Ids:
    longest = max(map(len, rows))
    return np.array([row + [IGNORED] * (longest - len(row)) for row in rows], np.int32)


HUGGING_FACE = "hf:"
MERGES, LEARNED_FROM = 24, 4096  # byte pairs to merge, and texts to learn them from


# Two families of GPT-2 that the toolkit trains and freezes, with different tokens, width and depth.
SIZES = {
    "toolkit:bytes": {"layers": 2, "heads": 4, "width": 64},
    "toolkit:pairs": {"layers": 3, "heads": 4, "width": 48},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/question_answering/Kconfig."""

    source_bytes: int
    frozen_model_a: str
    frozen_model_b: str

    @property
    def models(self) -> tuple[str, str]:
        """Names of the two language models."""
        return self.frozen_model_a, self.frozen_model_b


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open questions in the tokens of both language models.

    Raises ConfigError for an unknown model or a missing package, DataError for damaged models and files.
    """
    name, synthetic = location.name, location.name not in PUBLISHED
    if synthetic:
        location.log(f"{name}: making {TRAIN_SIZE} + {TEST_SIZE} synthetic questions")
        train, test, source, anchor = questions("train"), questions("test"), "generated", ANCHOR
    else:
        train, test, folder = read_published(name, location.files)
        source, anchor = f"from {folder}", PUBLISHED_ANCHOR
    return packed(
        name,
        train,
        test,
        options,
        root=location.root,
        anchor=anchor,
        source=source,
        synthetic=synthetic,
    )


def packed(
    name: str,
    train: Sequence[Question],
    test: Sequence[Question],
    options: Options,
    *,
    root: Path,
    anchor: str,
    source: str,
    synthetic: bool,
) -> Dataset:
    """Return a data set of these questions. source: their origin, for messages. Raises as `open_set`."""
    texts = [question.source + anchor + question.answer for question in train[:LEARNED_FROM]]
    known = [_known(model, texts, root=root) for model in options.models]
    encoders = [encoder for encoder, *_ in known]
    # Both parts at once, because they share their columns.
    contents, tokens = pack([*train, *test], encoders, anchor=anchor, source_bytes=options.source_bytes)
    first, second = (
        Side(
            name=model,
            vocab_size=vocab_size,
            width=width,
            anchor=tuple(encoder.encode(anchor)),
            answer_tokens=answers.shape[1],
            text_tokens=texts.shape[1],
        )
        for model, (encoder, vocab_size, width), (answers, texts) in zip(
            options.models, known, tokens, strict=True
        )
    )
    spec = AnswerSpec(
        name=name, source_bytes=options.source_bytes, sides=(first, second), synthetic=synthetic
    )
    train_part, test_part = (
        part_of(contents[rows], [ids[rows] for answers_and_texts in tokens for ids in answers_and_texts])
        for rows in (slice(len(train)), slice(len(train), None))
    )
    source = f"{name}: {len(train)} + {len(test)} questions, {source}"
    return Dataset(spec, train_part, test_part, source)


def folder_of(model: str, *, root: Path) -> Path:
    """Return the directory in the name of a Hugging Face model."""
    return (root / Path(model.removeprefix(HUGGING_FACE)).expanduser()).resolve()


def _known(model: str, texts: Sequence[str], *, root: Path) -> tuple[Encoder, int, int]:
    """Return tokenizer, vocabulary size and width of a language model, which is not loaded."""
    if model.startswith(HUGGING_FACE):
        folder = folder_of(model, root=root)
        return huggingface.HuggingFaceTokenizer(folder), *huggingface.sizes(folder)
    if model not in SIZES:
        raise ConfigError(
            f"there is no language model {model!r}",
            todo=f"name {', '.join(SIZES)} or {HUGGING_FACE}DIRECTORY (CONFIG_FROZEN_MODEL_A, _B)",
        )
    tokenizer = ByteTokenizer() if model == "toolkit:bytes" else learned(texts, merges=MERGES)
    return tokenizer, tokenizer.vocab_size, SIZES[model]["width"]
