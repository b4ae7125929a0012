"""Questions about short texts, for two frozen language models, each in its own tokens.

Synthetic ones are those of `lib.data.datasets.key_values`. The JSON files of SQuAD (Rajpurkar et al. 2016)
and HotpotQA (Yang et al. 2018) give the question followed by its context, so that truncation drops context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lib.data.datasets.files import DataLocation
from lib.data.datasets.key_values import Question, questions
from lib.data.datasets.question_answering.huggingface import sizes
from lib.data.datasets.question_answering.spec import AnswerSpec, Side
from lib.data.datasets.user_files import find_file
from lib.data.tokenizers import ByteTokenizer, learned
from lib.data.types import ArrayPart, Dataset
from lib.errors import ConfigError, DataError, os_errors
from lib.nn import IGNORED

ANCHOR = " A="  # text between a source and its answer

Reader: TypeAlias = Callable[[Any], "Iterator[Question | None]"]
PUBLISHED_ANCHOR = "\nAnswer:"


def squad(content: Any) -> Iterator[Question | None]:
    """Yield the questions of a SQuAD file with their first answers; None for one without an answer."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                question, answers = entry["question"], entry["answers"]
                yield (
                    _published_question(question, paragraph["context"], answers[0]["text"])
                    if answers
                    else None
                )


def hotpot(content: Any) -> Iterator[Question]:
    """Yield the questions of a HotpotQA file with all their paragraphs."""
    for entry in content:
        context = " ".join("".join(sentences) for _, sentences in entry["context"])
        yield _published_question(entry["question"], context, entry["answer"])


# The names that the training and the test file may have, and their reader.
PUBLISHED: dict[str, tuple[tuple[str, ...], tuple[str, ...], Reader]] = {
    "squad": (("train-v1.1.json", "train-v2.0.json"), ("dev-v1.1.json", "dev-v2.0.json"), squad),
    "hotpot": (
        ("hotpot_train_v1.1.json",),
        ("hotpot_dev_distractor_v1.json", "hotpot_dev_fullwiki_v1.json"),
        hotpot,
    ),
}


def read_published(name: str, data_dir: Path) -> tuple[list[Question], list[Question], str]:
    """Return training and test questions of set `name`, and their origin for messages. Raises DataError."""
    *names, read = PUBLISHED[name]
    instead = "set CONFIG_DATASET_KEY_VALUES=y, which needs no files"
    files = [find_file(data_dir, name, spellings, instead=instead) for spellings in names]
    (train, first), (test, second) = (read_file(file, read) for file in files)
    return train, test, f"from {first} and {second}"


def read_file(file: Path, read: Reader) -> tuple[list[Question], str]:
    """Return the questions with an answer, and the file with the number of others; DataError if malformed."""
    try:
        with os_errors("read"):
            entries = list(read(json.loads(file.read_text(encoding="utf-8"))))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{file} is not as published", why=why, todo="fetch it again") from error
    questions = [entry for entry in entries if entry is not None]
    if not questions:
        raise DataError(f"{file} has no question with an answer", todo="fetch it again, or use another set")
    without = len(entries) - len(questions)
    return questions, f"{file}{f' (without {without} questions that have no answer)' if without else ''}"


def _published_question(question: str, context: str, answer: str) -> Question:
    """Return a question with each text on one line, because an answer ends with its line."""
    return Question(f"{_line(question)}\n{_line(context)}", f" {_line(answer)}\n")


def _line(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a text")
    return " ".join(text.split()).replace("\0", "")


Ids = npt.NDArray[np.int32]


class Encoder(Protocol):
    """A tokenizer that only encodes."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""


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


def _filled(rows: Sequence[list[int]]) -> Ids:
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
        train, test = list(questions("train")), list(questions("test"))
        source, anchor = "generated", ANCHOR
        location.log(f"{name}: made {len(train)} + {len(test)} synthetic questions")
    else:
        train, test, source = read_published(name, location.files)
        anchor = PUBLISHED_ANCHOR
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

    def part(rows: slice) -> ArrayPart:
        """Return rows as in `AnswerSpec`; the last columns are the next sample's source."""
        columns = [ids[rows] for answers_and_texts in tokens for ids in answers_and_texts]
        others = np.roll(contents[rows], -1, axis=0).astype(np.int32)
        return ArrayPart(contents[rows], np.concatenate([*columns, others], axis=1))

    source = f"{name}: {len(train)} + {len(test)} questions, {source}"
    return Dataset(spec, part(slice(len(train))), part(slice(len(train), None)), source)


def folder_of(model: str, *, root: Path) -> Path:
    """Return the directory in the name of a Hugging Face model."""
    return (root / Path(model.removeprefix(HUGGING_FACE)).expanduser()).resolve()


def _known(model: str, texts: Sequence[str], *, root: Path) -> tuple[Encoder, int, int]:
    """Return tokenizer, vocabulary size and width of a language model, which is not loaded."""
    if model.startswith(HUGGING_FACE):
        folder = folder_of(model, root=root)
        from lib.data.huggingface_tokenizer import HuggingFaceTokenizer  # needs an extra

        return HuggingFaceTokenizer(folder), *sizes(folder)
    if model not in SIZES:
        raise ConfigError(
            f"there is no language model {model!r}",
            todo=f"name {', '.join(SIZES)} or {HUGGING_FACE}DIRECTORY (CONFIG_FROZEN_MODEL_A, _B)",
        )
    tokenizer = ByteTokenizer() if model == "toolkit:bytes" else learned(texts, merges=MERGES)
    return tokenizer, tokenizer.vocab_size, SIZES[model]["width"]
