"""SST-2: a sentence, a tab and 0 or 1 a line. With or without GLUE's line of headings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from lib.data.datasets.files import damaged
from lib.data.tokenizers.byte_char import as_text
from lib.data.types import ArrayPart, Labels, Tokenizer
from lib.errors import os_error

CLASSES = 2
_HEADINGS = "sentence\tlabel"


def read_sentences(file: Path) -> tuple[list[str], Labels]:
    """The sentences and their labels (N,). Raises DataError where a line is something else."""
    try:
        lines = as_text(file.read_bytes()).splitlines()
    except OSError as error:
        raise os_error("read", error) from error
    start = 1 if lines and lines[0] == _HEADINGS else 0
    sentences, labels = list[str](), list[int]()
    for number, line in enumerate(lines[start:], start=start + 1):
        sentence, _, label = line.rpartition("\t")
        if label not in ("0", "1") or not sentence.strip():
            raise damaged(file, f"line {number} is not a sentence, a tab and 0 or 1")
        sentences.append(sentence.strip())
        labels.append(int(label))
    if not sentences:
        raise damaged(file, "it holds no sentences")
    return sentences, np.array(labels, np.int64)


def rows(
    sentences: list[str], labels: Labels, *, tokenizer: Tokenizer, block_size: int, pad: int
) -> tuple[ArrayPart, int]:
    """The sentences as rows of tokens with `pad` after them, and how many were longer and were cut."""
    tokens: npt.NDArray[np.int64] = np.full((len(sentences), block_size), pad, np.int64)
    cut = 0
    for row, sentence in zip(tokens, sentences, strict=True):
        ids = tokenizer.encode(sentence)
        cut += len(ids) > block_size
        row[: len(ids)] = ids[:block_size]
    return ArrayPart(tokens, labels), cut
