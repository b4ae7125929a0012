"""Exhibits of a language model: the text that it writes at each checkpoint."""

from __future__ import annotations

import numpy as np

from lib.data.types import TextSpec, TokenPart
from lib.reports.exhibits import Exhibit, Text
from train.generate import Sampling, continued_text
from train.job import TrainedModel
from train.tasks.classify import exhibits as classify

PROMPT_TOKENS, TOKENS, TEMPERATURE = 16, 200, 0.8


def exhibits(trained: TrainedModel) -> list[Exhibit]:
    """Return a continuation of the same prompt, with the same draws, by the weights of each checkpoint."""
    job, dataset = trained.job, trained.dataset
    if not isinstance(dataset.spec, TextSpec):
        return classify.exhibits(trained)
    if dataset.tokenizer is None:
        return []  # what the tokens stand for is not known
    assert isinstance(dataset.test, TokenPart)
    inputs_1T, _ = dataset.test.take(np.zeros(1, np.int64))
    prompt = inputs_1T[0, :PROMPT_TOKENS].tolist()
    sampling = Sampling(temperature=TEMPERATURE, top_k=0, tokens=TOKENS, seed=job.config.seed)
    note = (
        f"The prompt is the first {PROMPT_TOKENS} tokens of the evaluation part; temperature {TEMPERATURE}."
    )
    return [
        Text(
            title=f"Text after step {step:,}",
            note=note,
            text=continued_text(job, dataset.tokenizer, prompt, sampling=sampling),
        )
        for step in trained.checkpoints()
    ]
