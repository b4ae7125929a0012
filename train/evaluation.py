"""A model on its evaluation part: with averaged weights, if there are any, and every sample once."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import torch

from lib.distributed.fsdp import cut_again
from lib.plan.types import SHARDS_WEIGHTS
from train.job import Job
from train.tasks.base import Sums, Totals


@contextlib.contextmanager
def evaluated_weights(job: Job) -> Iterator[None]:
    """Within it the model is as it is evaluated: with averaged weights, if there are any."""
    job.model.eval()
    try:
        with job.ema.averaged() if job.ema is not None else contextlib.nullcontext():
            job.backend.mark_step()  # lest weights that change places are part of the graph of a batch
            yield
    finally:
        job.model.train()
        job.backend.mark_step()
        if job.plan.strategy in SHARDS_WEIGHTS:
            cut_again(job.model)


def evaluate(job: Job) -> dict[str, float]:
    """Means over the evaluation part, every sample counted exactly once on any number of ranks."""
    totals = Totals()
    for sums in evaluation_sums(job):
        totals.add(sums)
    return job.task.report(totals.means(job.backend))


@torch.no_grad()
def evaluation_sums(job: Job) -> Generator[Sums, None, None]:
    """This rank's part of an evaluation, batch by batch."""
    plan, backend = job.plan, job.backend
    with evaluated_weights(job):
        for batch in job.eval_loader.batches(
            rank=backend.rank, world=backend.world, batch_size=plan.micro_batch
        ):
            with backend.autocast(plan.precision):
                sums = job.task.evaluation(job.forward, batch)
            backend.mark_step()
            yield sums
