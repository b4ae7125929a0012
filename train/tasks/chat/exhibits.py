"""Exhibits of answers: those that a model gives at each checkpoint, beside those of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from lib.data.datasets.chat.data import text_of
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.chat.templates import template_of
from lib.data.types import Dataset
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
    tokens = template_of(dataset.tokenizer).prompt(prompt)
    return text_of(_given(job, tokens, dataset.spec, sampling), dataset)


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
