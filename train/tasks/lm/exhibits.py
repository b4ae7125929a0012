"""Exhibits of a language model: the text that it writes at each checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from lib.data.types import Dataset, TextSpec, TokenPart
from lib.reports.page import Block
from train.generate import Sampling, continued_text
from train.job import Job
from train.tasks.classify import exhibits as classify

PROMPT_TOKENS, TOKENS, TEMPERATURE = 16, 120, 0.8
_NOTE = f"The prompt is the first {PROMPT_TOKENS} tokens of the evaluation part; temperature {TEMPERATURE}."


def exhibits(job: Job, dataset: Dataset, checkpoints: Iterator[int]) -> list[Block]:
    """Return a continuation of the same prompt, with the same draws, by the weights of each checkpoint."""
    if not isinstance(dataset.spec, TextSpec):
        return classify.exhibits(job, dataset, checkpoints)
    if (tokenizer := dataset.tokenizer) is None:
        return []  # what the tokens stand for is not known
    assert isinstance(dataset.test, TokenPart)
    prompt = dataset.test.take(np.zeros(1, np.int64))[0][0, :PROMPT_TOKENS].tolist()
    sampling = Sampling(temperature=TEMPERATURE, top_k=0, tokens=TOKENS, seed=job.config.seed)
    torch.set_num_threads(1)  # until the report ends: threads mostly wait in products for one sample
    text = partial(continued_text, job, tokenizer, prompt, sampling=sampling)
    return [
        {"kind": "text", "title": f"Text after step {step:,}", "note": _NOTE, "text": text()}
        for step in checkpoints
    ]
