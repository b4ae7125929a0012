"""Questions out of the JSON files of SQuAD (Rajpurkar et al. 2016) and HotpotQA (Yang et al. 2018).

A source is the question and after it the context, so that what is cut off a long one is context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.data.datasets.files import first_file
from lib.data.datasets.question_answering.key_values import Question
from lib.errors import DataError, os_error

ANCHOR = "\nAnswer:"


@dataclass(frozen=True, slots=True)
class Published:
    """A published set: what its two files may be called, and how questions are read from one."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Any], Iterator[Question]]


def squad(content: Any) -> Iterator[Question]:
    """The questions of a file of SQuAD that have an answer, with the first that is given."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                if asked["answers"]:
                    yield _question(asked["question"], paragraph["context"], asked["answers"][0]["text"])


def hotpot(content: Any) -> Iterator[Question]:
    """The questions of a file of HotpotQA, with all paragraphs that go with each, in their order."""
    for asked in content:
        context = " ".join("".join(sentences) for _, sentences in asked["context"])
        yield _question(asked["question"], context, asked["answer"])


PUBLISHED = {
    "squad": Published(("train-v1.1.json", "train-v2.0.json"), ("dev-v1.1.json", "dev-v2.0.json"), squad),
    "hotpot": Published(
        ("hotpot_train_v1.1.json",), ("hotpot_dev_distractor_v1.json", "hotpot_dev_fullwiki_v1.json"), hotpot
    ),
}


def read_published(name: str, data_dir: Path) -> tuple[list[Question], list[Question], Path]:
    """The training and the test part of the set `name`, and their folder: DATA_DIR/`name` or DATA_DIR.

    Raises DataError where a file is missing or damaged.
    """
    found, folders = PUBLISHED[name], (data_dir / name, data_dir)
    files = []
    for spellings in (found.train, found.test):
        file = first_file(folder / spelling for folder in folders for spelling in spellings)
        if file is None:
            raise DataError(
                f"there is no {' or '.join(spellings)} in {folders[0]} or {folders[1]}",
                todo="put it there, or set CONFIG_DATASET_KEY_VALUES=y, which needs no files",
            )
        files.append(file)
    train, test = (read_file(file, found.read) for file in files)
    return train, test, files[0].parent


def read_file(file: Path, read: Callable[[Any], Iterator[Question]]) -> list[Question]:
    """All questions of one file. Raises DataError where it is not as published."""
    try:
        questions = list(read(json.loads(file.read_text(encoding="utf-8"))))
    except OSError as error:
        raise os_error("read", error) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{file} is not as published", why=f"{type(error).__name__}: {error}") from error
    if not questions:
        raise DataError(f"{file} has no question with an answer")
    return questions


def _question(question: str, context: str, answer: str) -> Question:
    """In one line each, for an answer ends with its line."""
    return Question(f"{_line(question)}\n{_line(context)}", f" {_line(answer)}\n")


def _line(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text")
    return " ".join(text.split()).replace("\0", "")
