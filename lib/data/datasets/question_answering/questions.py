"""Questions about texts: synthetic key-value lookups, SQuAD and HotpotQA.

A synthetic text has two facts and a key: "k=vv m=ww ?m" is answered by "ww". Texts are generated from their
numbers, identical on every machine, and no test text is in the training part. The JSON files of SQuAD
(Rajpurkar et al. 2016) and HotpotQA (Yang et al. 2018) give the question followed by its context, so that
truncation drops context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from lib.data.datasets.files import first_file
from lib.errors import DataError, os_errors
from lib.rng import integers, key

VERSION = 1
KEYS, LETTERS = "abcd", "abcdefghijklmnop"  # more keys take longer to learn
TRAIN_SIZE, TEST_SIZE = 65_536, 512
ANCHOR = " A="  # text between a source and its answer

PartName: TypeAlias = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class Question:
    """A text that ends in a question, and the answer that follows the anchor, with its line end."""

    source: str
    answer: str


def questions(part: PartName) -> list[Question]:
    """Return the TRAIN_SIZE or TEST_SIZE questions of a part."""
    if part == "train":
        return _drawn("train", TRAIN_SIZE)
    seen = {question.source for question in _drawn("train", TRAIN_SIZE)}
    # About one in 25 is in the training part.
    fresh = [question for question in _drawn("test", 2 * TEST_SIZE) if question.source not in seen]
    return fresh[:TEST_SIZE]


def _drawn(part: PartName, count: int) -> list[Question]:
    below = (len(KEYS), len(KEYS) - 1, 2, *[len(LETTERS)] * 4)
    columns = [integers(key("facts", part, n), (count,), below=limit) for n, limit in enumerate(below)]
    return [_question(*row) for row in np.stack(columns, axis=1).tolist()]


def _question(first: int, further: int, requested: int, *values: int) -> Question:
    keys = KEYS[first], KEYS[(first + 1 + further) % len(KEYS)]
    a, b, c, d = (LETTERS[value] for value in values)
    pairs = a + b, c + d
    facts = " ".join(f"{name}={value}" for name, value in zip(keys, pairs, strict=True))
    return Question(f"{facts} ?{keys[requested]}", f"{pairs[requested]}\n")


PUBLISHED_ANCHOR = "\nAnswer:"


def squad(content: Any) -> Iterator[Question]:
    """Yield the answerable questions of a SQuAD file with their first answers."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                if answers := entry["answers"]:
                    yield _published_question(entry["question"], paragraph["context"], answers[0]["text"])


def hotpot(content: Any) -> Iterator[Question]:
    """Yield the questions of a HotpotQA file with all their paragraphs."""
    for entry in content:
        context = " ".join("".join(sentences) for _, sentences in entry["context"])
        yield _published_question(entry["question"], context, entry["answer"])


# The names that the training and the test file may have, and their reader.
PUBLISHED: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], Iterator[Question]]]] = {
    "squad": (("train-v1.1.json", "train-v2.0.json"), ("dev-v1.1.json", "dev-v2.0.json"), squad),
    "hotpot": (
        ("hotpot_train_v1.1.json",),
        ("hotpot_dev_distractor_v1.json", "hotpot_dev_fullwiki_v1.json"),
        hotpot,
    ),
}


def read_published(name: str, data_dir: Path) -> tuple[list[Question], list[Question], Path]:
    """Return training and test questions of set `name`, and their folder. Raises DataError."""
    train_names, test_names, read = PUBLISHED[name]
    folders, files = (data_dir / name, data_dir), []
    for spellings in (train_names, test_names):
        file = first_file(folder / spelling for folder in folders for spelling in spellings)
        if file is None:
            raise DataError(
                f"there is no {' or '.join(spellings)} in {folders[0]} or {folders[1]}",
                todo="put it there, or set CONFIG_DATASET_KEY_VALUES=y, which needs no files",
            )
        files.append(file)
    train, test = (read_file(file, read) for file in files)
    return train, test, files[0].parent


def read_file(file: Path, read: Callable[[Any], Iterator[Question]]) -> list[Question]:
    """Return all questions of a file. Raises DataError if it is not as published."""
    try:
        with os_errors("read"):
            questions = list(read(json.loads(file.read_text(encoding="utf-8"))))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{file} is not as published", why=f"{type(error).__name__}: {error}") from error
    if not questions:
        raise DataError(f"{file} has no question with an answer")
    return questions


def _published_question(question: str, context: str, answer: str) -> Question:
    """Return a question with each text on one line, because an answer ends with its line."""
    return Question(f"{_line(question)}\n{_line(context)}", f" {_line(answer)}\n")


def _line(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text")
    return " ".join(text.split()).replace("\0", "")
