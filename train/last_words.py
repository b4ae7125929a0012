"""What a finished run says of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from lib.data.types import Dataset, TokenPart
from lib.plan.types import SHARDS_WEIGHTS
from train.job import Job
from train.lm import told_floors
from train.sample import Sampling, continued_text
from train.subject import cache_of

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 100


@runtime_checkable
class Remarking(Protocol):
    """A model with something to say of its last call, where a reader should know of it."""

    def remark(self) -> str | None: ...


def say_remark(job: Job) -> None:
    """What the model has to say of the last batch that it was evaluated on."""
    if not job.backend.is_main or not isinstance(job.model, Remarking):
        return
    remark = job.model.remark()
    if remark is not None:
        job.record.say(remark)


def say_sample(job: Job, dataset: Dataset) -> None:
    """What the language model makes of the beginning of its evaluation part."""
    if not isinstance(dataset.test, TokenPart) or dataset.tokenizer is None:
        return
    if not job.backend.is_main and job.plan.strategy not in SHARDS_WEIGHTS:
        return  # with weights in parts, a forward pass takes all ranks
    inputs_1T, _ = dataset.test.take(np.zeros(1, np.int64))
    prompt = inputs_1T[0, :PROMPT_TOKENS].tolist()
    sampling = Sampling(temperature=0.8, top_k=0, tokens=SAMPLE_TOKENS, seed=job.config.seed)
    job.record.say(f"Sample: {continued_text(job, dataset.tokenizer, prompt, sampling=sampling)}")


def say_floors(job: Job, dataset: Dataset, *, root: Path) -> None:
    """What counting achieves on the text of the language model."""
    if not job.backend.is_main:
        return
    floors = told_floors(dataset, cache_dir=cache_of(root), say=job.record.say)
    if floors is not None:
        job.record.say(floors)
