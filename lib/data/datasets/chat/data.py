"""Conversations of the user, in tokens of which those of answers count: for the fine-tuning of language models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from lib.data.datasets.chat.conversations import Conversation, read_conversations
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.chat.templates import Sample, plain_text, template_of
from lib.data.datasets.files import DataLocation
from lib.data.datasets.text_files import block_size_of, tokenizer_of
from lib.data.jsonl import training_and_validation
from lib.data.types import ArrayPart, Dataset
from lib.errors import ConfigError
from lib.nn import IGNORED

SHOWN = 3  # samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/chat/Kconfig."""

    file: str
    validation: Literal["split", "other"]
    validation_pct: int | None  # the one that `validation` does not name is None
    validation_file: str | None
    too_long: Literal["error", "drop", "cut"]
    packing: bool


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open the conversations. Raises ConfigError, with file and line, for one that cannot be used."""
    unread = dict[str, None]()

    def read(name: str) -> list[Conversation]:
        found, others = read_conversations(location.files / name)
        unread.update(dict.fromkeys(others))
        return found

    parts = training_and_validation(
        read,
        options.file,
        other=options.validation_file,
        percent=options.validation_pct,
        key=lambda each: json.dumps(each.messages, sort_keys=True),
    )
    messages = (message for part in parts for each in part for message in each.messages)
    known = {character for message in messages for text in plain_text(message) for character in text}
    tokenizer = tokenizer_of(location, characters="".join(sorted(known)))
    template, size = template_of(tokenizer), block_size_of(location)
    read_samples = [[template.sample(conversation) for conversation in part] for part in parts]
    (train, lost), (test, lost_test) = (
        fitting(samples, size, policy=options.too_long) for samples in read_samples
    )
    spec = ChatSpec(
        name="chat",
        vocab_size=template.size,
        block_size=size,
        unit=tokenizer.unit,
        pad=max(template.end, 0),
        end=template.end,
        packed=options.packing,
    )
    rows = as_rows(train, spec), as_rows(test, spec)
    longest = max(len(sample.ids) for sample in (*train, *test))
    packed = f" packed into {rows[0].size} + {rows[1].size} rows," if options.packing else ""
    rewritten = sum(sample.rewritten for sample in (*train, *test))
    notes = (
        f"{rewritten} of them count in their last answer only: the template rewrites earlier ones" * bool(rewritten),
        f"training: {lost}" * bool(lost),
        f"validation: {lost_test}" * bool(lost_test),
        f"keys that are not read: {', '.join(unread)}" * bool(unread),
    )
    source = (
        f"chat: {len(train)} + {len(test)} conversations from {location.files / options.file} by "
        f"{template.name},{packed} at most {longest} {tokenizer.unit}s, {_share(train):.1%} of them in answers"
    )
    return Dataset(spec, *rows, "; ".join([source, *filter(None, notes)]), tokenizer)


def _share(samples: Sequence[Sample]) -> float:
    return sum(sum(sample.counts) for sample in samples) / sum(len(sample.ids) for sample in samples)


def fitting(samples: Sequence[Sample], size: int, *, policy: str) -> tuple[list[Sample], str]:
    """Return the samples with at most `size` tokens, and what is lost by the policy, as text; "" for nothing.

    Raises ConfigError for a sample that is too long if the policy is "error", for one without a token that
    counts, and if no sample is left.
    """
    long, kept = [sample for sample in samples if len(sample.ids) > size], list[Sample]()
    for sample in samples:
        if not any(sample.counts[1:]):
            why = "the template gives none to its answers"
            raise ConfigError(f"{sample.place} has no token that counts", why=why, todo="leave the line out")
    if long and policy == "error":
        need = max(len(sample.ids) for sample in long)
        raise ConfigError(
            f"{long[0].place} takes {len(long[0].ids):,} tokens, CONFIG_BLOCK_SIZE is {size:,}",
            why=f"so do {len(long):,} of {len(samples):,} conversations, the longest {need:,}",
            todo=f"set CONFIG_BLOCK_SIZE={need}, CONFIG_CHAT_TOO_LONG_DROP=y or CONFIG_CHAT_TOO_LONG_CUT=y",
        )
    for sample in samples:
        cut = sample._replace(ids=sample.ids[:size], counts=sample.counts[:size])
        if len(sample.ids) <= size or (policy == "cut" and any(cut.counts[1:])):
            kept.append(cut)
    if not kept:
        what = f"no conversation has an answer within {size:,} tokens"
        raise ConfigError(what, todo="raise CONFIG_BLOCK_SIZE")
    counted = sum(sum(sample.counts) for sample in samples)
    lost = 1 - sum(sum(sample.counts) for sample in kept) / counted
    dropped = len(samples) - len(kept)
    told = f"{len(long)} of {len(samples)} are longer than {size}, {dropped} of them dropped and {len(long) - dropped} cut"
    return kept, f"{told}, with {lost:.1%} of the tokens that count" if long else ""


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
    room, rows = np.zeros(len(lengths), np.int64), list[list[int]]()
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fits = room[: len(rows)] >= lengths[number]
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = size
        rows[row].append(number)
        room[row] -= lengths[number]
    return rows


def shown(dataset: Dataset) -> list[str]:
    """Return the first samples for training as text, each answer that counts in [[ ]]."""
    spec, tokenizer = dataset.spec, dataset.tokenizer
    assert isinstance(spec, ChatSpec) and tokenizer is not None
    inputs, targets = dataset.train.take(np.arange(min(SHOWN, dataset.train.size)))
    texts = []
    for number, (tokens, wanted) in enumerate(zip(inputs, targets, strict=True)):
        ids, documents = tokens if spec.packed else (tokens, np.zeros_like(tokens))
        # A token counts as the target of the one before it.
        counts = np.concatenate(([False], wanted[:-1] != IGNORED))
        used = int(documents.argmin()) if spec.packed and documents.min() < 0 else len(ids)
        last = used if spec.packed else max(np.flatnonzero(counts), default=0) + 1
        runs = groupby(range(last), key=lambda at: (documents[at], counts[at]))
        text = ""
        for (document, count), places in runs:
            piece = text_of([int(ids[at]) for at in places], dataset)
            text += f"[[{piece}]]" if count else piece
        texts.append(f"sample {number + 1}: {last} tokens, {int(counts.sum())} count: {text!r}")
    return texts


def text_of(tokens: Sequence[int], dataset: Dataset) -> str:
    """Return tokens as text, with <end> for an end that is none of the tokenizer's tokens."""
    assert isinstance(dataset.spec, ChatSpec) and dataset.tokenizer is not None
    known = dataset.tokenizer.vocab_size
    runs = groupby(tokens, key=lambda token: token < known)
    return "".join(dataset.tokenizer.decode([*run]) if own else "<end>" * len([*run]) for own, run in runs)
