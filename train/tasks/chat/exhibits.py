"""Exhibits of answers: those that a model gives at each checkpoint, beside those of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lib.data.datasets.chat.conversations import ANSWERS, Conversation, read_conversations
from lib.data.datasets.chat.data import text_of
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.chat.templates import check_contents, template_of
from lib.data.inputs import STDIN, content_of, files_of
from lib.data.types import Dataset
from lib.errors import raise_faults
from lib.nn import IGNORED
from lib.reports.page import Block
from train.generate import Sampling, continuation
from train.job import Job

SHOWN, TOKENS = 3, 128
_NOTE = f"The first conversations for evaluation; greedy decoding of at most {TOKENS} tokens."


def exhibits(job: Job, dataset: Dataset, checkpoints: Iterator[int]) -> list[Block]:
    """Return the last answers of some conversations by the weights of each checkpoint."""
    torch.set_num_threads(1)  # until the report ends: threads mostly wait in products for one sample
    return [
        {
            "kind": "text",
            "title": f"Answers after step {step:,}",
            "note": _NOTE,
            "text": answers(job, dataset),
        }
        for step in checkpoints
    ]


def answer(job: Job, dataset: Dataset, prompt: str, *, sampling: Sampling) -> str:
    """Return the answer to a text of the user, as text. Raises ConfigError if the template refuses it."""
    assert isinstance(dataset.spec, ChatSpec) and dataset.tokenizer is not None
    question = Conversation("PROMPT", [{"role": "user", "content": prompt}])
    tokens = template_of(dataset.tokenizer).prompt(question)
    return text_of(_given(job, tokens, dataset.spec, sampling), dataset)


def answered(
    job: Job,
    dataset: Dataset,
    paths: Sequence[str],
    *,
    sampling: Sampling,
    log: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> tuple[list[str], dict[str, npt.NDArray[Any]]]:
    """Return the places of the questions in JSON Lines, and the columns of their answers.

    "answer" is without white space at its ends. Where a line has an answer, too, it is "wanted", and "exact"
    tells whether they are equal and the given one has ended. Raises ConfigError for lines that cannot be
    used, and for a question that leaves no room for an answer.
    """
    spec, tokenizer = dataset.spec, dataset.tokenizer
    assert isinstance(spec, ChatSpec) and tokenizer is not None
    questions, template, unread = list[tuple[Conversation, str | None]](), template_of(tokenizer), set[str]()
    for file in files_of(paths, frozenset({".jsonl"})):
        content = content_of(file) if file == STDIN else None
        name = Path("standard input" if file == STDIN else file)
        found, others = read_conversations(name, open_ended=True, content=content)
        unread.update(others)
        for each in found:
            check_contents(each, tokenizer)
            *before, last = each.messages
            ends = last["role"] == ANSWERS
            wanted = last["content"].strip() if ends else None
            questions.append((each._replace(messages=before) if ends else each, wanted))
    if unread:
        log(f"Keys that are not read: {', '.join(sorted(unread))}")
    prompts = [template.prompt(question) for question, _ in questions]
    sizes = zip(questions, map(len, prompts), strict=True)
    raise_faults(
        "there is no room for an answer",
        [f"{each.place} takes {size:,} tokens" for (each, _), size in sizes if size >= spec.block_size],
        todo=f"shorten them: the run was trained on at most {spec.block_size:,} tokens",
    )
    given, ended = list[str](), list[bool]()
    for prompt in prompts:
        room = spec.block_size - len(prompt)
        tokens = _given(job, prompt, spec, replace(sampling, tokens=min(sampling.tokens, room))).tolist()
        ended.append(tokens[-1:] == [spec.end])
        given.append(tokenizer.decode(tokens[: len(tokens) - ended[-1]]).strip())
        progress(len(given), len(prompts))
    if cut := len(ended) - sum(ended):
        log(f"{cut} of {len(given)} answers are cut at TOKENS={sampling.tokens}, or at CONFIG_BLOCK_SIZE")
    names, answers_there = [each.place for each, _ in questions], [own for _, own in questions]
    columns = {"answer": np.array(given, object)}
    if count := sum(own is not None for own in answers_there):
        pairs = zip(given, ended, answers_there, strict=True)
        exact = [None if own is None else has_ended and text == own for text, has_ended, own in pairs]
        columns |= {"wanted": np.array(answers_there, object), "exact": np.array(exact, object)}
        log(f"exact match {exact.count(True) / count:.4f} over {count} answers that are there")
    return names, columns


def _given(job: Job, prompt: Sequence[int], spec: ChatSpec, sampling: Sampling) -> npt.NDArray[np.int64]:
    until = replace(sampling, end=spec.end)
    return np.array(continuation(job, prompt, sampling=until, vocab_size=spec.vocab_size))


def answers(job: Job, dataset: Dataset) -> str:
    """Return prompt, wanted and given answer of the first conversation in each of SHOWN rows, as text."""
    assert isinstance(dataset.spec, ChatSpec)
    inputs, targets = dataset.test.take(np.arange(min(SHOWN, dataset.test.size)))
    texts = []
    for row, row_targets in zip(inputs, targets, strict=True):
        tokens, documents = row if row.ndim == 2 else (row, np.zeros_like(row))
        places = np.flatnonzero((row_targets != IGNORED) & (documents == 0))
        last = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)[-1][:TOKENS]
        prompt, wanted = tokens[: last[0] + 1], row_targets[last]
        sampling = Sampling(temperature=0.0, top_k=0, tokens=len(last), seed=0)
        given = _given(job, prompt.tolist(), dataset.spec, sampling)
        columns = {"Prompt": prompt, "Wanted": wanted, "Given": given}
        texts.append("\n".join(f"{name}: {text_of(ids, dataset)}" for name, ids in columns.items()))
    return "\n\n".join(texts)
