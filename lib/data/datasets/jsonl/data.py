"""Texts of the user in JSON Lines: each with a label, or with a tag for each of its words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lib.data.datasets.class_names import naming_note
from lib.data.datasets.files import DataLocation
from lib.data.datasets.text_files import WholeTextTokenizer, block_size_of, padded, row_facts, tokenizer_of
from lib.data.jsonl import named, read_objects, training_and_validation, value_of
from lib.data.types import ArrayPart, Dataset, TextClassSpec, Tokenizer, TokenTagSpec
from lib.errors import ConfigError, DataError, raise_faults
from lib.nn import IGNORED

Row = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/jsonl/Kconfig."""

    file: str
    validation: Literal["split", "other"]
    validation_pct: int | None  # the one that `validation` does not name is None
    validation_file: str | None


class Text(NamedTuple):
    """A text with its place (file:line). labels: one for each of its words, at least one."""

    place: str
    words: list[str]
    labels: list[str]


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open the texts. Raises ConfigError, with file and line, for those that cannot be used."""
    file, tagged = location.files / options.file, location.name == "tagged"
    parse, noun = (_tagged, "tag") if tagged else (_labelled, "label")
    unread = set[str]()

    def parsed(place: str, line: dict[str, Any]) -> Text:
        unread.update(line.keys() - ({"tokens", "tags"} if tagged else {"text", "label"}))
        return parse(place, line)

    train, test = training_and_validation(
        lambda path: read_objects(path, parsed),
        file,
        other=None if (other := options.validation_file) is None else location.files / other,
        percent=options.validation_pct,
        key=lambda text: "\x1f".join(text.words),
        prefix="JSONL",
    )
    names = tuple(sorted({label for text in train for label in text.labels}, key=_order))
    unknown = [(text, label) for text in test for label in sorted({*text.labels} - {*names})]
    raise_faults(
        f"{file} lacks texts",
        [f"{text.place}: no text for training has the {noun} {label!r}" for text, label in unknown],
        todo="leave the text out, or add some for training",
    )
    if len(names) < 2:
        raise DataError(f"{file}: every {noun} is {names[0]!r}", todo="add texts with another one")
    characters = {character for text in (*train, *test) for word in text.words for character in word}
    tokenizer = tokenizer_of(location, characters="".join(sorted({*characters, " "})))
    known, block_size = row_facts(tokenizer, location), block_size_of(location)
    spec: TokenTagSpec | TextClassSpec = TextClassSpec(name="jsonl", classes=len(names), **known)
    if tagged:
        spec = TokenTagSpec(name="tagged", tags=names, **known)
    rows, cut = zip(*(encoded(texts, tokenizer, spec, names) for texts in (train, test)), strict=True)
    source = (
        f"{location.name}: {len(train)} + {len(test)} texts from {named(file)}, {len(names)} {noun}s; "
        f"{cut[0]} + {cut[1]} {'words' if tagged else 'texts'} are longer than {block_size} "
        f"{tokenizer.unit}s, and cut"
    ) + (f"; keys that are not read: {', '.join(sorted(unread))}" if unread else "")
    source += naming_note(names)
    return Dataset(spec, rows[0], rows[1], source, tokenizer, class_names=names)


def _order(label: str) -> tuple[bool, int, str]:
    """Sort whole numbers as numbers."""
    return (False, int(label), label) if label.isdecimal() else (True, 0, label)


def _labelled(place: str, read: dict[str, Any]) -> Text:
    """Return a text with its label. Raises ConfigError for others."""
    text, label = (value_of(place, read, key) for key in ("text", "label"))
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'{place}: "text" is no text', todo='write {"text": "...", "label": "..."}')
    if not isinstance(label, str | int) or label == "":
        what = f'{place}: "label" is {json.dumps(label):.20}'
        raise ConfigError(what, todo="make it a name, a whole number, true or false")
    return Text(place, [text.strip()], [label if isinstance(label, str) else json.dumps(label)])


def _tagged(place: str, read: dict[str, Any]) -> Text:
    """Return words with their tags. Raises ConfigError for others."""
    words, tags = _strings(place, read, "tokens"), _strings(place, read, "tags")
    if len(words) != len(tags):
        raise ConfigError(f"{place} has {len(words)} tokens and {len(tags)} tags", todo="give each a tag")
    return Text(place, words, tags)


def _strings(place: str, read: dict[str, Any], name: str) -> list[str]:
    found = value_of(place, read, name)
    if not (isinstance(found, list) and found and all(isinstance(each, str) and each for each in found)):
        raise ConfigError(f'{place}: "{name}" is no list of texts', todo=f'write "{name}": ["...", ...]')
    return found


def encoded(
    texts: Sequence[Text], tokenizer: Tokenizer, spec: TokenTagSpec | TextClassSpec, names: Sequence[str]
) -> tuple[ArrayPart, int]:
    """Return rows of tokens with their labels, and the number of texts or words that the rows cut."""
    places = {name: place for place, name in enumerate(names)}
    if isinstance(spec, TextClassSpec):
        only = [text.words[0] for text in texts]
        places_N = [text.place for text in texts]
        own: dict[str, Any] = {"block_size": spec.block_size, "pad": spec.pad, "places": places_N}
        tokens, cut = padded(only, tokenizer=tokenizer, **own)
        return ArrayPart(tokens, np.array([places[text.labels[0]] for text in texts], np.int64)), cut
    tokens = np.full((len(texts), spec.block_size), spec.pad, np.int64)
    targets = np.full(tokens.shape, IGNORED, np.int32)
    cut = 0
    for row, text in enumerate(texts):
        if isinstance(tokenizer, WholeTextTokenizer):
            cut += _encode_words(text, tokenizer, spec, places, tokens[row], targets[row])
            continue
        end = 0
        for number, (word, tag) in enumerate(zip(text.words, text.labels, strict=True)):
            ids = tokenizer.encode(f" {word}" if number else word)[: spec.block_size - end + 1]
            if end + len(ids) > spec.block_size:
                cut += len(text.words) - number
                break
            tokens[row, end : end + len(ids)] = ids
            end += len(ids)
            targets[row, end - 1] = places[tag]  # there a causal model has seen the whole word
    return ArrayPart(tokens, targets), cut


def _encode_words(
    text: Text,
    tokenizer: WholeTextTokenizer,
    spec: TokenTagSpec,
    places: Mapping[str, int],
    tokens_T: Row,
    targets_T: Row,
) -> int:
    """Write the tokens of a text into a row, and its tags; return the number of words that are cut."""
    try:
        ids, last = tokenizer.encode_words(text.words, spec.block_size)
    except DataError as error:
        raise DataError(f"{text.place}: {error.what}", todo=error.todo) from error
    if spec.pad in ids:
        raise DataError(f"{text.place} has the token of padding", todo="remove it from the text")
    tokens_T[: len(ids)] = ids
    for place, tag in zip(last, text.labels, strict=True):
        if place is not None:
            targets_T[place] = places[tag]
    return last.count(None)
