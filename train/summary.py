"""What a finished run says of its model."""

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
    """A model with something to say of its last call, where a reader should know of it."""

    def remark(self) -> str | None: ...


@contextmanager
def told_memory(job: Job, hardware: Hardware) -> Iterator[None]:
    """Training; at its end, and where a signal ends it, the run says how full its device's memory was."""
    try:
        yield
    except Stopped:
        _say_memory(job, hardware)
        raise
    _say_memory(job, hardware)


def _say_memory(job: Job, hardware: Hardware) -> None:
    """The peak beside what was predicted, or the micro-batch that would have used the memory better."""
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
    """What there is to be said of the trained model."""
    say_remark(job)
    say_sample(job, dataset)
    say_floors(job, dataset, root=root)


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
