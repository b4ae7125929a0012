"""SST-2: sentences of film reviews, negative or positive."""

from __future__ import annotations

from dataclasses import dataclass

from lib.data.datasets.catalogue import SST2_FOLDERS, SST2_REMOTES
from lib.data.datasets.files import Place
from lib.data.datasets.sst2 import sentences
from lib.data.datasets.text_files import INSTEAD, block_size_of, tokenizer_of
from lib.data.types import Dataset, TextClassSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No symbols of its own."""


def outline(_: Options, place: Place) -> None:
    """Only the sentences tell how many there are, and of which characters."""


def open_set(_: Options, place: Place) -> Dataset:
    """Sentences as rows of tokens. Raises DataError where files are missing or damaged."""
    block_size = block_size_of(place)
    files = place.have(SST2_REMOTES, SST2_FOLDERS, name="data set sst2", instead=INSTEAD)
    read = [sentences.read_sentences(file) for file in files]
    characters = sorted({character for texts, _ in read for text in texts for character in text})
    tokenizer = tokenizer_of(place, characters="".join(characters))
    pad = tokenizer.vocab_size
    (train, train_cut), (test, test_cut) = (
        sentences.rows(texts, labels, tokenizer=tokenizer, block_size=block_size, pad=pad)
        for texts, labels in read
    )
    spec = TextClassSpec(
        name="sst2",
        vocab_size=pad + 1,
        block_size=block_size,
        classes=sentences.CLASSES,
        pad=pad,
    )
    source = (
        f"sst2: {train.size} + {test.size} sentences from {files[0].parent}, "
        f"{train_cut} + {test_cut} of them cut at {block_size} {tokenizer.unit}s"
    )
    return Dataset(spec, train, test, source, tokenizer)
