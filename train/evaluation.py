"""Evaluation: with averaged weights, if there are any, and every sample once."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import torch

from lib.distributed.fsdp import reshard
from lib.plan.types import SHARDS_WEIGHTS
from train.job import Job
from train.tasks.base import Sums, Totals


@contextlib.contextmanager
def evaluated_weights(job: Job) -> Iterator[None]:
    """Use the averaged weights, if there are any, within the context."""
    job.model.eval()
    try:
        with job.ema.averaged() if job.ema is not None else contextlib.nullcontext():
            job.backend.mark_step()  # keeps the swap of weights out of the graph of a batch
            yield
    finally:
        job.model.train()
        job.backend.mark_step()
        if job.plan.strategy in SHARDS_WEIGHTS:
            reshard(job.model)


def evaluate(job: Job) -> dict[str, float]:
    """Return means over the evaluation part; every sample counts exactly once on any number of ranks."""
    totals = Totals()
    for sums in evaluation_sums(job):
        totals.add(sums)
    return job.task.report(totals.means(job.backend))


@torch.no_grad()
def evaluation_sums(job: Job) -> Generator[Sums, None, None]:
    """Evaluate this rank's part, yielding sums batch by batch."""
    plan, backend = job.plan, job.backend
    with evaluated_weights(job):
        for batch in job.eval_loader.batches(
            rank=backend.rank, world=backend.world, batch_size=plan.micro_batch
        ):
            with backend.autocast(plan.precision):
                sums = job.task.evaluation(job.forward, batch)
            backend.mark_step()
            yield sums
