"""Two ranks that train models of timm and transformers by several strategies: `ranks_worker DIRECTORY NAMES`.

Rank 0 leaves DIRECTORY/NAME-STRATEGY.pt, or DIRECTORY/NAME-single.pt of one process.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lib.devices.base import Backend
from lib.distributed.fsdp import gathered
from tests.e2e.ranks import fork_ranks
from tests.extras.foreign import WITH_NORMS, config_of, data_of
from tests.support.training import small_job, small_plan
from train.job import Progress
from train.loop import optimizer_step

STRATEGIES = ("ddp", "fsdp")


def gradients(name: str, place: Path, backend: Backend, strategy: str) -> dict[str, Tensor]:
    """Of the second step of eight samples, of blocks that are recomputed."""
    config = config_of(name, place, grad_checkpoint="blocks", momentum=0.0, learning_rate=0.01)
    norm_batch, world = 2 * (name in WITH_NORMS), backend.world
    shard = world if strategy == "fsdp" else 1
    plan = small_plan(*[4] * (2 // world), norm_batch=norm_batch, world=world, strategy=strategy, shard=shard)
    job = small_job(config, plan, data_of(name, config), backend=backend)
    found: dict[str, Tensor] = {}

    def take(*_: object) -> None:
        for key, weight in job.model.named_parameters():
            found[key] = gathered(weight.grad).clone()

    job.optimizer.register_step_pre_hook(take)
    for step in range(2):
        optimizer_step(job, Progress(step=step))
    return found


def work(backend: Backend, *, place: Path, names: list[str]) -> None:
    for name in names:
        for strategy in STRATEGIES:
            found = gradients(name, place / str(backend.rank), backend, strategy)
            if backend.is_main:
                torch.save(found, place / f"{name}-{strategy}.pt")


if __name__ == "__main__":
    fork_ranks(2, partial(work, place=Path(sys.argv[1]), names=sys.argv[2:]))
