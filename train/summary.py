"""Run summary: final messages about memory and the trained model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from lib.data.types import Dataset, TokenPart
from lib.plan.advice import TARGET, advised
from lib.plan.types import SHARDS_WEIGHTS, Hardware
from lib.units import bytes_text
from train.generate import Sampling, continued_text
from train.job import Job
from train.signals import Stopped
from train.tasks.lm.task import told_floors
from train.training_data import cache_of

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 100


@runtime_checkable
class Remarking(Protocol):
    """A model with a note on its last call that the user should read."""

    def remark(self) -> str | None: ...


@contextmanager
def told_memory(job: Job, hardware: Hardware) -> Iterator[None]:
    """Report the device's peak memory when training ends, also by a signal."""
    try:
        yield
    except Stopped:
        _say_memory(job, hardware)
        raise
    _say_memory(job, hardware)


def _say_memory(job: Job, hardware: Hardware) -> None:
    """Print the peak beside the prediction, or a micro-batch that would have used the memory better."""
    peak_bytes = job.backend.peak_memory_bytes() if job.backend.is_main else None
    if peak_bytes is None:
        return
    config, plan, total_bytes = job.config, job.plan, hardware.devices[0].total_bytes
    filled = peak_bytes / total_bytes
    told = (
        f"Memory: tensors took {bytes_text(peak_bytes)} of {bytes_text(total_bytes)} at most ({filled:.0%})"
    )
    percent = config.elastic_target_util  # of LatentWire's policy, whose batches come from its own table
    if percent is None and config.auto_method in ("predict", "probe"):
        predicted = "nothing" if plan.memory is None else bytes_text(plan.memory.peak_bytes)
        job.record.say(f"{told}; predicted was {predicted}")
        return
    size = advised(
        plan.micro_batch,
        share=plan.effective_batch // plan.world,
        norm_batch=plan.norm_batch,
        filled=filled,
        target=TARGET if percent is None else percent / 100,
    )
    if size != plan.micro_batch:
        by_hand = f"CONFIG_BATCH_SIZE={size} CONFIG_TARGET_EFFECTIVE_BATCH={plan.effective_batch}"
        told += f"; {size} at a time instead of {plan.micro_batch} would use it better at the next start"
        told += f", with the same effective batch: CONFIG_HYPER_PARAM_MANUAL=y {by_hand}"
    job.record.say(told)


def say_last_words(job: Job, dataset: Dataset, *, root: Path) -> None:
    """Print the summary of the trained model."""
    say_remark(job)
    say_sample(job, dataset)
    say_floors(job, dataset, root=root)


def say_remark(job: Job) -> None:
    """Print the model's note on the last batch of evaluation."""
    if not job.backend.is_main or not isinstance(job.model, Remarking):
        return
    remark = job.model.remark()
    if remark is not None:
        job.record.say(remark)


def say_sample(job: Job, dataset: Dataset) -> None:
    """Print the language model's continuation of the beginning of its evaluation part."""
    if not isinstance(dataset.test, TokenPart) or dataset.tokenizer is None:
        return
    if not job.backend.is_main and job.plan.strategy not in SHARDS_WEIGHTS:
        return  # with sharded weights a forward pass is collective
    inputs_1T, _ = dataset.test.take(np.zeros(1, np.int64))
    prompt = inputs_1T[0, :PROMPT_TOKENS].tolist()
    sampling = Sampling(temperature=0.8, top_k=0, tokens=SAMPLE_TOKENS, seed=job.config.seed)
    job.record.say(f"Sample: {continued_text(job, dataset.tokenizer, prompt, sampling=sampling)}")


def say_floors(job: Job, dataset: Dataset, *, root: Path) -> None:
    """Print the n-gram baseline on the text of the language model."""
    if not job.backend.is_main:
        return
    floors = told_floors(dataset, cache_dir=cache_of(root), say=job.record.say)
    if floors is not None:
        job.record.say(floors)
