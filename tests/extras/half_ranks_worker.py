"""Two ranks that train adapters of layers in half precision: `half_ranks_worker DIRECTORY`, of a model.

Rank 0 leaves DIRECTORY/STRATEGY-HALVED.pt: what is trained after some steps, and the bytes of all weights.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.config import Config
from lib.data import TokenPart
from lib.data.types import Dataset
from lib.devices.base import Backend
from lib.distributed.fsdp import gathered, local
from tests.e2e.ranks import fork_ranks
from tests.extras.foreign import config_of
from tests.support.tokens import BLOCK, text_spec
from tests.support.training import ADAPTERS, small_job, small_plan
from train import adapters
from train.job import Progress
from train.loop import optimizer_step
from train.training_data import TrainingData, make_training_data

STRATEGIES = {"ddp": 1, "zero1": 1, "zero2": 2, "fsdp": 2}  # and processes that share a replica


def token_data(config: Config) -> TrainingData:
    """Random bytes in the tokens of `with_weights`."""
    tokens = np.random.default_rng(0).integers(3, 256, 40 * BLOCK).astype("uint16")
    parts = [TokenPart(tokens, block_size=BLOCK, shifted=shifted) for shifted in (True, False)]
    spec = text_spec(vocab_size=257, tokens=len(tokens) - 1)
    dataset = Dataset(spec=spec, train=parts[0], test=parts[1], source="noise")
    return make_training_data(config, dataset)


def of_directory(folder: Path, place: Path, **changes: Any) -> Config:
    own = {"model_options": {"dir": str(folder), "input": "causal"}, "precision": "bf16"}
    return config_of("lm-llama", place / "other", **ADAPTERS | own | changes)


def trained_by(config: Config, backend: Backend, strategy: str) -> dict[str, Any]:
    """Adapters after three steps of 8 rows, and bytes of the weights of this rank."""
    world = backend.world
    sizes = [4] * (2 // world)
    layout = {"world": world, "strategy": strategy, "shard": STRATEGIES.get(strategy, 1)}
    plan = small_plan(*sizes, precision="bf16", **layout)
    job = small_job(config, plan, token_data(config), backend=backend, dtype=torch.float32)
    for step in range(3):
        optimizer_step(job, Progress(step=step))
    weights = dict(job.model.named_parameters())
    held = sum(local(each).numel() * each.element_size() for each in weights.values())
    found = {name: gathered(each.detach()).clone() for name, each in weights.items() if each.requires_grad}
    return {"trained": found, "bytes": held}


def work(backend: Backend, *, place: Path) -> None:
    config, halve = of_directory(place, place, optimizer="adamw", momentum=None), adapters.halve
    for strategy in STRATEGIES:
        for halved in (True, False):
            adapters.halve = halve if halved else lambda *_: False  # type: ignore[assignment]
            found = trained_by(config, backend, strategy)
            if backend.is_main:
                torch.save(found, place / f"{strategy}-{halved}.pt")


if __name__ == "__main__":
    fork_ranks(2, partial(work, place=Path(sys.argv[1])))
