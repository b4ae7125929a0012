"""SST-2: sentences of film reviews, labelled negative or positive."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lib.data.datasets.files import DataLocation, damaged
from lib.data.datasets.published import Remote
from lib.data.datasets.text_files import INSTEAD, block_size_of, padded, row_facts, tokenizer_of
from lib.data.tokenizers import as_lines
from lib.data.types import ArrayPart, Dataset, Labels, TextClassSpec
from lib.errors import os_errors
from lib.plugins import NoOptions as Options

CLASSES = 2
_HEADINGS = "sentence\tlabel"


def read_sentences(file: Path) -> tuple[list[str], Labels]:
    """Read sentences and labels (N,): a sentence, a tab and 0 or 1 per line. Raises DataError."""
    with os_errors("read"):
        lines = as_lines(file.read_bytes(), file)
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


_SST2 = ("https://raw.githubusercontent.com/clairett/pytorch-sentiment-classification/master/data/SST2",)
SST2_FOLDERS = ("sst2", "SST-2", "SST2", "")
SST2_REMOTES = (
    Remote("train.tsv", "ec192f833a64da08f475488a77b0d0b47db47acd0f458bd18433fc793b569920", _SST2),
    Remote("dev.tsv", "eddea6b39e601dd4e7a672b53cc40fdf6019fa80522f351206c24340ca5d9359", _SST2),
)


def open_set(_: Options, location: DataLocation) -> Dataset:
    """Open sentences as rows of tokens. Raises DataError if files are missing or damaged."""
    files = location.find_all(SST2_REMOTES, SST2_FOLDERS, name="data set sst2", instead=INSTEAD)
    read = [read_sentences(file) for file in files]
    characters = sorted({character for texts, _ in read for text in texts for character in text})
    tokenizer = tokenizer_of(location, characters="".join(characters))
    known, block_size = row_facts(tokenizer, location), block_size_of(location)
    (train, train_cut), (test, test_cut) = (
        (ArrayPart(tokens, labels), cut)
        for texts, labels in read
        for tokens, cut in [padded(texts, tokenizer=tokenizer, block_size=block_size, pad=known["pad"])]
    )
    spec = TextClassSpec(name="sst2", classes=CLASSES, **known)
    source = (
        f"sst2: {train.size} + {test.size} sentences from {files[0].parent}, "
        f"{train_cut} + {test_cut} of them cut at {block_size} {tokenizer.unit}s"
    )
    return Dataset(spec, train, test, source, tokenizer)
