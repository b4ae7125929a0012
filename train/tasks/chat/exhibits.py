"""Exhibits of answers: what the model answers at each checkpoint, beside what it should."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lib.data.datasets.chat.data import text_of
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.types import Dataset
from lib.nn import IGNORED
from lib.reports.page import Block
from train.generate import Sampling, continuation
from train.job import Job

SHOWN, TOKENS = 3, 128


def exhibits(job: Job, dataset: Dataset, checkpoints: Iterator[int]) -> list[Block]:
    """Return the last answers of the first conversations for evaluation, by the weights of each checkpoint."""
    torch.set_num_threads(1)  # until the report ends: threads mostly wait in products for one sample
    note = f"Greedy decoding, at most {TOKENS} tokens, of the first conversations for evaluation."
    return [
        {"kind": "text", "title": f"Answers after step {step:,}", "note": note, "text": _answers(job, dataset)}
        for step in checkpoints
    ]


def _answers(job: Job, dataset: Dataset) -> str:
    spec, texts = dataset.spec, list[str]()
    assert isinstance(spec, ChatSpec)
    for prompt, wanted in last_answers(dataset, SHOWN):
        tokens = min(TOKENS, len(wanted))
        sampling = Sampling(temperature=0.0, top_k=0, tokens=tokens, seed=0, end=spec.end)
        got = continuation(job, prompt, sampling=sampling)
        parts = {"Prompt": prompt, "Wanted": wanted[:tokens], "Got": got}
        texts.append("\n".join(f"{name}: {text_of(ids, dataset)}" for name, ids in parts.items()))
    return "\n\n".join(texts)


def last_answers(dataset: Dataset, count: int) -> list[tuple[list[int], list[int]]]:
    """Return what precedes the last answer of the first conversation of a row, and the answer, of `count` rows."""
    inputs, targets = dataset.test.take(np.arange(min(count, dataset.test.size)))
    found = []
    for row, wanted in zip(inputs, targets, strict=True):
        tokens, documents = row if row.ndim == 2 else (row, np.zeros_like(row))
        places = np.flatnonzero((wanted != IGNORED) & (documents == 0))
        last = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)[-1]
        found.append((tokens[: last[0] + 1].tolist(), wanted[last].tolist()))
    return found
