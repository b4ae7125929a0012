"""The configuration under test, with its data and hardware, scaled down to a few samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lib.config import Config
from lib.devices.base import Backend
from lib.plan.types import Hardware, Plan
from train.build import make_job
from train.job import Job
from train.record import Record
from train.training_data import TrainingData

ROWS = 10  # samples per batch: the fewest with three splits; 16 if they are normalised together
NO_WARM_UP: dict[str, Any] = {"warmup_unit": "percent", "warmup_pct": 0}
GROUP = 2  # of batch normalisation, in place of a NORM_BATCH that is larger than these batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The configuration, data, hardware and plan to be checked."""

    config: Config
    data: TrainingData
    hardware: Hardware
    plan: Plan
    root: Path
    runs: Path

    def splits(self) -> tuple[tuple[int, ...], ...]:
        """Splits of one batch into micro-batches."""
        if self.plan.norm_batch:
            return (16,), (8, 8), (4, 4, 4, 4)
        return (ROWS,), (5, 5), (4, 4, 2), (3, 3, 3, 1), (2, 2, 2, 2, 2)

    def job(
        self,
        *micro_batches: int,
        device: bool = False,
        world: int = 1,
        backend: Backend | None = None,
        **changes: Any,
    ) -> Job:
        """Build a job with these micro-batches: in float64 on the CPU, or with `device` as configured."""
        plain: dict[str, Any] = {
            "data_placement": "stream",
            "num_workers": 1,
            "prefetch": 1,
            "grad_clip": 0.0,
        }
        config = self.config.replace(**plain | changes)
        plan = small_plan(self.plan, micro_batches, world=world, device=device)
        return make_job(
            config,
            plan,
            self.data,
            hardware=self.hardware,
            backend=backend or Backend(plan.device),
            record=Record(),
            dtype=torch.float32 if device else torch.float64,
        )


def small_plan(plan: Plan, micro_batches: Sequence[int], *, world: int, device: bool) -> Plan:
    """Shrink `plan` to these micro-batches on each of `world` ranks; on the CPU unless `device`."""
    effective = sum(micro_batches) * world
    own: dict[str, Any] = {} if device else {"device": "cpu", "precision": "fp32", "channels_last": False}
    return dataclasses.replace(
        plan,
        world=world,
        strategy="ddp" if world > 1 else "single",
        shard=1,
        micro_batch=micro_batches[0],
        accumulation=len(micro_batches),
        last_micro_batch=micro_batches[-1],
        effective_batch=effective,
        target=effective,
        norm_batch=GROUP if plan.norm_batch else 0,
        compile=False,
        memory=None,
        **own,
    )
