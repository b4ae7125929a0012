"""Ranks that train a small language model in every way to spread it.

`sharded_worker DIRECTORY WORLD SAVED PART`: rank 0 leaves DIRECTORY/WORLD.pt. States that four ranks have
left in SAVED are loaded by other numbers of them. Those that save compute gradients, and train frozen or slow
layers, with HSDP alone where PART is "all"; with "more" they do so in the other ways, and save nothing. The
test calls `gradients_of` itself for the one process that the others are compared with.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.devices.base import Backend
from lib.distributed.fsdp import gathered, local, local_shard
from lib.plan.fitting import split_evenly
from lib.plan.sharding import layouts
from lib.plan.types import Layout, Plan, rank_shares
from tests.e2e.ranks import fork_ranks
from tests.support.tokens import BLOCK, VOCAB, small_lm_config, text_data
from tests.support.training import ADAPTERS, MemoryRecord, Wrapped, small_job, small_plan
from train.job import Job, Progress
from train.loop import load_state_dict, optimizer_step, state_dict, train
from train.tasks.base import Forward, Sums
from train.training_data import TrainingData

EFFECTIVE = 23  # unequal shares
ACCUMULATIONS = (1, 3)  # at once; and with a first, a middle and a last micro-batch
SAVED_BY = 4
STEPS = 3
LOADED = ("zero1", "fsdp")
SAVED = {"optimizer": "adamw", "ema": True, "ema_decay": 0.5, "grad_clip": 0.05, "max_steps": STEPS}


class Ragged(Wrapped):
    """Of each sequence only as many targets count as its first token says, which the device alone knows."""

    def training(self, forward: Forward, batch: Batch) -> Sums:
        loss_BT, counted_BT = losses(forward, batch)
        return Sums((loss_BT * counted_BT).sum(), counted_BT.sum(), {})


class MeanOfMeans(Ragged):
    """The mistake: a mean of each micro-batch, and the mean of those."""

    def training(self, forward: Forward, batch: Batch) -> Sums:
        sums = super().training(forward, batch)
        assert isinstance(sums.count, Tensor)
        return Sums(sums.loss / sums.count, torch.ones_like(sums.loss.detach()), {})


def losses(forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
    logits_BTV = forward(batch.inputs)
    loss_BT = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), batch.targets.flatten(), reduction="none"
    ).view_as(batch.targets)
    counted_BT = torch.arange(BLOCK) <= batch.inputs[:, :1] % BLOCK
    return loss_BT, counted_BT


@functools.cache
def data() -> TrainingData:
    noise = np.random.default_rng(0).integers(0, VOCAB, 60 * BLOCK).astype(np.uint8)
    return text_data(small_lm_config(), train=noise)


def plan_of(layout: Layout, accumulation: int) -> Plan:
    share = rank_shares(EFFECTIVE, world=layout.world)[0]
    split = split_evenly(share, bound=-(-share // accumulation))
    sizes = [split.micro_batch] * (split.accumulation - 1) + [split.last_micro_batch]
    layout_fields = {"world": layout.world, "strategy": layout.strategy, "shard": layout.shard}
    return small_plan(*sizes, effective_batch=EFFECTIVE, **layout_fields)


def gradients_of(
    layout: Layout, accumulation: int, *, backend: Backend, task: type[Ragged] = Ragged
) -> dict[str, Tensor]:
    """What the optimizer is given in the first step."""
    config = small_lm_config(momentum=0.0)
    job = small_job(config, plan_of(layout, accumulation), data(), backend=backend, task=task)
    found: dict[str, Tensor] = {}

    def take(*_: object) -> None:
        for name, parameter in job.model.named_parameters():
            found[name] = gathered(parameter.grad).clone()

    job.optimizer.register_step_pre_hook(take)
    optimizer_step(job, Progress())
    return found


def saving_job(
    layout: Layout, backend: Backend, *, record: MemoryRecord | None = None, **changes: Any
) -> Job:
    config = small_lm_config().replace(**SAVED | changes)
    return small_job(config, plan_of(layout, 1), data(), backend=backend, record=record, task=Ragged)


FROZEN: dict[str, dict[str, Any]] = {
    "frozen": {"freeze": "backbone.token *.mlp_in backbone.blocks.1.qkv"},
    "adapters": ADAPTERS | {"lora_train": "backbone.position"},
}


def frozen_weights(layout: Layout, backend: Backend, what: str) -> dict[str, Tensor]:
    """The model after some steps, a part of it frozen, and the others with rates by depth."""
    job = saving_job(layout, backend, **FROZEN[what], layer_decay=0.5)
    train(job, Progress())
    state: dict[str, Tensor] = gathered(job.model.state_dict())
    return {name: value.clone() for name, value in state.items()}


def state_bytes(job: Job) -> int:
    """Weights, gradients and the optimizer's numbers of each weight, on this rank."""
    gradients = [torch.zeros_like(parameter) for parameter in job.model.parameters()]
    state = [value for of_one in local_shard(job.optimizer).state.values() for value in of_one.values()]
    numbers = [value for value in state if isinstance(value, Tensor) and value.dim() > 0]
    return sum(
        local(tensor).numel() * tensor.element_size()
        for tensor in [*job.model.parameters(), *gradients, *numbers]
    )


def digest(value: Any) -> str:
    """The same for the same tensors under the same names."""
    sha = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, Tensor):
            sha.update(item.detach().contiguous().numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                sha.update(str(key).encode())
                add(item[key])
        elif isinstance(item, list | tuple):
            for part in item:
                add(part)
        else:
            sha.update(repr(item).encode())

    add(value)
    return sha.hexdigest()


def weights_and_states(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": state["model"], "optimizer": state["optimizer"]["state"], "ema": state["ema"]}


def outcome(backend: Backend, saved: Path, part: str) -> dict[str, Any]:
    found: dict[str, Any] = {"gradients": {}, "bytes": {}, "digests": {}, "further": {}}
    for layout in layouts(backend.world):
        for what in FROZEN if trains_rest(backend.world, layout.strategy, part) else ():
            found[what, layout.strategy] = frozen_weights(layout, backend, what)
        for accumulation in ACCUMULATIONS if trains_rest(backend.world, layout.strategy, part) else ():
            key = (layout.strategy, accumulation)
            found["gradients"][key] = gradients_of(layout, accumulation, backend=backend)
        if backend.world == 3:
            found["mean of means", layout.strategy] = gradients_of(
                layout, 2, backend=backend, task=MeanOfMeans
            )
        if part == "more":
            continue
        if backend.world == SAVED_BY:
            save(layout, backend, saved, found)
        elif layout.strategy in LOADED:
            load(layout, backend, saved, found)
    return found


def trains_rest(world: int, strategy: str, part: str) -> bool:
    return world != SAVED_BY or (part == "more") == (strategy != "hsdp")


def save(layout: Layout, backend: Backend, directory: Path, found: dict[str, Any]) -> None:
    """After every step, once while training waits and once beside it: of these the last one is left."""
    states = dict[bool, dict[int, Any]]()
    for aside in (False, True):
        record = MemoryRecord()
        each = {"checkpoint_interval_steps": 1, "checkpoint_async": aside}
        job = saving_job(layout, backend, record=record, **each)
        train(job, Progress())
        states[aside] = dict(record.states)
    sizes = backend.all_reduce_max((float(state_bytes(job)),))
    if backend.is_main:
        torch.save(states[True][STEPS], directory / f"saved-{layout.strategy}.pt")
        at_once, beside = (
            [digest(weights_and_states(state)) for state in states[aside].values()] for aside in (False, True)
        )
        found["at once", layout.strategy], found["beside", layout.strategy] = at_once, beside
        found["digests"][layout.strategy] = beside[-1]
        found["bytes"][layout.strategy] = sizes[0]


def load(layout: Layout, backend: Backend, directory: Path, found: dict[str, Any]) -> None:
    """Take what four ranks of the same way have saved, and two more steps, each evaluated."""
    saved = directory / f"saved-{'fsdp' if layout.world == 1 else layout.strategy}.pt"
    job = saving_job(layout, backend, max_steps=STEPS + 2, eval_interval_steps=1, keep_best=False)
    progress = load_state_dict(job, torch.load(saved, weights_only=True))
    state = state_dict(job, progress)
    if backend.is_main:
        found["digests"][layout.strategy] = digest(weights_and_states(state))
    train(job, progress)
    state = state_dict(job, progress)
    if backend.is_main:
        found["further"][layout.strategy] = {name: value.clone() for name, value in state["model"].items()}


def main() -> None:
    directory, world, saved, part = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

    data()  # once, before there are several

    def work(backend: Backend) -> None:
        found = outcome(backend, saved, part)
        if backend.is_main:
            torch.save(found, directory / f"{world}.pt")

    fork_ranks(world, work)


if __name__ == "__main__":
    main()
