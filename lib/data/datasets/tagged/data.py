"""Texts of the user whose words have tags, such as the kinds of named entities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lib.data.datasets.files import DataLocation
from lib.data.datasets.text_files import block_size_of, tokenizer_of
from lib.data.jsonl import read_objects, training_and_validation
from lib.data.types import ArrayPart, Dataset, Tokenizer, TokenTagSpec
from lib.errors import ConfigError
from lib.nn import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/tagged/Kconfig."""

    file: str
    validation: Literal["split", "other"]
    validation_pct: int | None  # the one that `validation` does not name is None
    validation_file: str | None


class Text(NamedTuple):
    """A text with its place (file:line); as many tags as words, and at least one."""

    place: str
    words: list[str]
    tags: list[str]


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open the texts. Raises ConfigError, with file and line, for one that cannot be used."""
    file = location.files / options.file
    train, test = training_and_validation(
        lambda name: read_texts(location.files / name),
        options.file,
        other=options.validation_file,
        percent=options.validation_pct,
        key=lambda text: "\x1f".join(text.words),
    )
    tags = tuple(sorted({tag for text in train for tag in text.tags}))
    for text in test:
        if unknown := sorted({*text.tags} - {*tags}):
            todo = "leave the text out, or add some for training"
            raise ConfigError(f"{text.place}: no text for training has the tag {unknown[0]!r}", todo=todo)
    characters = {character for text in (*train, *test) for word in text.words for character in word}
    tokenizer = tokenizer_of(location, characters="".join(sorted({*characters, " "})))
    spec = TokenTagSpec(
        name="tagged",
        vocab_size=tokenizer.vocab_size + 1,
        block_size=block_size_of(location),
        tags=tags,
        pad=tokenizer.vocab_size,
    )
    rows, cut = zip(*(encoded(texts, tokenizer, spec) for texts in (train, test)), strict=True)
    source = (
        f"tagged: {len(train)} + {len(test)} texts from {file}, {len(tags)} tags; "
        f"{cut[0]} + {cut[1]} words are beyond {spec.block_size} {tokenizer.unit}s"
    )
    return Dataset(spec, rows[0], rows[1], source, tokenizer, class_names=tags)


def read_texts(file: Path) -> list[Text]:
    """Read the texts of a file. Raises ConfigError, with file and line, for one that cannot be used."""
    texts = []
    for place, read in read_objects(file):
        words, tags = _strings(place, read, "tokens"), _strings(place, read, "tags")
        if len(words) != len(tags):
            raise ConfigError(f"{place} has {len(words)} tokens and {len(tags)} tags", todo="give each a tag")
        texts.append(Text(place, words, tags))
    return texts


def _strings(place: str, read: dict[str, Any], name: str) -> list[str]:
    found = read.get(name)
    if not (isinstance(found, list) and found and all(isinstance(each, str) and each for each in found)):
        raise ConfigError(f'{place}: "{name}" is no list of texts', todo=f'write "{name}": ["...", ...]')
    return found


def encoded(texts: Sequence[Text], tokenizer: Tokenizer, spec: TokenTagSpec) -> tuple[ArrayPart, int]:
    """Return rows of tokens with their tags, and the number of words that the rows have no place for."""
    tokens = np.full((len(texts), spec.block_size), spec.pad, np.int64)
    targets = np.full(tokens.shape, IGNORED, np.int32)
    places, cut = {tag: place for place, tag in enumerate(spec.tags)}, 0
    for row, text in enumerate(texts):
        end = 0
        for number, (word, tag) in enumerate(zip(text.words, text.tags, strict=True)):
            ids = tokenizer.encode(f" {word}" if number else word)[: spec.block_size - end + 1]
            if end + len(ids) > spec.block_size:
                cut += len(text.words) - number
                break
            tokens[row, end : end + len(ids)] = ids
            end += len(ids)
            targets[row, end - 1] = places[tag]  # there a causal model has seen the whole word
    return ArrayPart(tokens, targets), cut
