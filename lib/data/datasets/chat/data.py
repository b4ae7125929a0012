"""Conversations of the user in tokens, of which those of answers count: to fine-tune language models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lib.data.datasets.chat.conversations import (
    Conversation,
    key_values,
    read_conversations,
    with_other_answers,
)
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.chat.templates import PlainTemplate, Sample, check_contents, end_note, template_of
from lib.data.datasets.files import DataLocation
from lib.data.datasets.text_files import block_size_of, tokenizer_of
from lib.data.jsonl import named, training_and_validation
from lib.data.types import ArrayPart, Dataset, Indices
from lib.errors import ConfigError
from lib.nn import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/chat/Kconfig."""

    source: Literal["file", "key_values"]
    backwards: bool
    shuffle_answers: bool
    file: str | None  # None without files
    validation: str
    validation_pct: int | None  # the one that `validation` does not name is None
    validation_file: str | None
    too_long: Literal["error", "drop", "cut"]
    packing: bool
    bucketing: bool | None  # None where rows are packed


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open the conversations. Raises ConfigError, with file and line, for one that cannot be used."""
    notes, unread = list[str](), set[str]()

    def read(file: Path) -> list[Conversation]:
        found, others = read_conversations(file)
        unread.update(others)
        return found

    if options.file is None:
        origin = "synthetic keys and values"
        train, test = (key_values(part, backwards=options.backwards) for part in ("train", "test"))
    else:
        file, other = location.files / options.file, options.validation_file
        split: dict[str, Any] = {"percent": options.validation_pct, "prefix": "CHAT"}
        split["other"] = None if other is None else location.files / other
        train, test = training_and_validation(read, file, key=_content, **split)
        origin = f"{named(file)},"
    if options.shuffle_answers:
        train = with_other_answers(train)
        notes.append("CONTROL: the last answers for training are exchanged (CONFIG_CHAT_SHUFFLE_ANSWERS=y)")
    parts = train, test
    messages = (message for part in parts for each in part for message in each.messages)
    characters = {each for message in messages for text in PlainTemplate.text(message) for each in text}
    tokenizer = tokenizer_of(location, characters="".join(sorted(characters)))
    template, size = template_of(tokenizer), block_size_of(location)
    for each in (*train, *test):
        check_contents(each, tokenizer)
    whole = [[template.sample(each) for each in part] for part in parts]
    check_lengths([*whole[0], *whole[1]], size, policy=options.too_long)
    samples = [
        fitting(part, size, policy=options.too_long, notes=notes, of=name)
        for name, part in zip(("training", "validation"), whole, strict=True)
    ]
    spec = ChatSpec(
        name="chat",
        vocab_size=template.vocab_size,
        block_size=size,
        unit=tokenizer.unit,
        pad=max(template.end, 0),
        end=template.end,
        packed=options.packing,
        bucketed=bool(options.bucketing),
    )
    rows, both = [as_rows(part, spec) for part in samples], (*samples[0], *samples[1])
    counted, tokens = sum(sum(each.counts) for each in both), sum(len(each.ids) for each in both)
    if options.packing:
        notes.insert(0, f"packed into {rows[0].size} + {rows[1].size} rows")
    if rewritten := sum(sample.rewritten for sample in both):
        notes.append(f"the template rewrites earlier answers: {rewritten} count in their last one only")
    notes += end_note(template, tokenizer)
    if unread:
        notes.append(f"keys that are not read: {', '.join(sorted(unread))}")
    source = (
        f"chat: {len(samples[0])} + {len(samples[1])} conversations from {origin} by "
        f"{template.name}, at most {max(len(each.ids) for each in both)} {tokenizer.unit}s, "
        f"{counted / tokens:.1%} of them in answers"
    )
    return Dataset(spec, rows[0], rows[1], "; ".join([source, *notes]), tokenizer)


def _content(conversation: Conversation) -> str:
    return json.dumps(conversation.messages, sort_keys=True)


def check_lengths(samples: Sequence[Sample], size: int, *, policy: str) -> None:
    """Raise ConfigError for a sample of more than `size` tokens if the policy is "error".

    Also for one without a token that counts.
    """
    if without := [sample for sample in samples if not any(sample.counts[1:])]:
        why, todo = "the template gives its answers none", "leave the line out, or mend the template"
        raise ConfigError(f"{without[0].place} has no token that counts", why=why, todo=todo)
    long = [sample for sample in samples if len(sample.ids) > size]
    if long and policy == "error":
        need = max(len(sample.ids) for sample in long)
        raise ConfigError(
            f"{long[0].place} takes {len(long[0].ids):,} tokens, CONFIG_BLOCK_SIZE is {size:,}",
            why=f"{len(long):,} of {len(samples):,} conversations are longer; the longest takes {need:,}",
            todo=f"set CONFIG_BLOCK_SIZE={need}, CONFIG_CHAT_TOO_LONG_DROP=y or CONFIG_CHAT_TOO_LONG_CUT=y",
        )


def fitting(samples: Sequence[Sample], size: int, *, policy: str, notes: list[str], of: str) -> list[Sample]:
    """Return the samples with at most `size` tokens; what is lost by the policy is added to `notes`.

    of: name of the part. Raises ConfigError if no sample is left.
    """
    long = [sample for sample in samples if len(sample.ids) > size]
    if not long and samples:
        return list(samples)
    cut = [sample._replace(ids=sample.ids[:size], counts=sample.counts[:size]) for sample in samples]
    kept = [
        short
        for sample, short in zip(samples, cut, strict=True)
        if len(sample.ids) <= size or (policy == "cut" and any(short.counts[1:]))
    ]
    if not kept:
        what = f"no answer for {of} is within CONFIG_BLOCK_SIZE={size} tokens"
        raise ConfigError(what, todo="raise it")
    if long:
        before, after = (sum(sum(sample.counts) for sample in each) for each in (samples, kept))
        dropped, share = len(samples) - len(kept), 1 - after / before
        lost = f"{dropped} are left out and {len(long) - dropped} cut, {share:.1%} of the tokens that count"
        notes.append(f"{len(long)} of {len(samples)} conversations for {of} are longer than {size}: {lost}")
    return kept


def as_rows(samples: Sequence[Sample], spec: ChatSpec) -> ArrayPart:
    """Return samples as rows of `spec`."""
    lengths = [len(sample.ids) for sample in samples]
    rows = pack(lengths, spec.block_size) if spec.packed else [[number] for number in range(len(samples))]
    tokens = np.full((len(rows), spec.block_size), spec.pad, np.int64)
    documents, targets = np.full_like(tokens, -1), np.full(tokens.shape, IGNORED, np.int32)
    for row, numbers in enumerate(rows):
        start = 0
        for document, number in enumerate(numbers):
            _, ids, counts, _ = samples[number]
            stop = start + len(ids)
            tokens[row, start:stop], documents[row, start:stop] = ids, document
            targets[row, start : stop - 1] = np.where(counts[1:], ids[1:], IGNORED)
            start = stop
    return ArrayPart(np.stack((tokens, documents), axis=1) if spec.packed else tokens, targets)


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return which samples share a row of `size` tokens: the longest first, each in the first row with room.

    A function of the lengths (each at most `size`) alone, so neither ranks nor micro-batches change it.
    """
    room, rows = np.full(len(lengths), size), list[list[int]]()
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = int((room[: len(rows) + 1] >= lengths[number]).argmax())  # the next one has room
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        room[row] -= lengths[number]
    return rows


def show(dataset: Dataset, part: ArrayPart, places: Indices) -> list[str]:
    """Return rows `places` of a part as text, with what counts in [[ ]]."""
    texts = []
    for row, wanted in zip(*part.take(places), strict=True):
        tokens = row[0] if row.ndim == 2 else row
        counts = [False, *(wanted[:-1] != IGNORED)]  # a token is the target of the one before it
        last = int(np.flatnonzero(counts)[-1]) + 1
        text = ""
        for count, run in groupby(range(last), key=counts.__getitem__):
            piece = text_of(tokens[[*run]], dataset)
            text += f"[[{piece}]]" if count else piece
        texts.append(f"{last} tokens, {sum(counts)} count: {text!r}")
    return texts


def text_of(tokens: npt.NDArray[np.int64], dataset: Dataset) -> str:
    """Return tokens as text, with <end> for the end of an answer."""
    assert isinstance(dataset.spec, ChatSpec) and dataset.tokenizer is not None
    runs = groupby(tokens.tolist(), key=dataset.spec.end.__eq__)
    return "".join("<end>" if ends else dataset.tokenizer.decode([*run]) for ends, run in runs)
