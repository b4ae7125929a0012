"""Train small jobs on the simulated GPU, and print for each what its host waited for.

python -m tests.support.training_on_gpu CONFIGURATION[+FAULT] ...
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from lib.devices import base
from lib.devices.base import Backend
from lib.plan import plan as make_plan
from lib.plan.types import Kind
from tests.contract.test_life_of_a_value import data_of, narrow_config
from tests.support.examples import examples
from tests.support.simulated_gpu import DEVICE, HOST, NAME, SimulatedGpu
from tests.support.training import CPU, Wrapped, small_job
from train.job import Progress
from train.loop import train
from train.record import Record
from train.tasks.base import Sums, Task

STEPS, INTERVAL = 12, 5
LOSS = 1e-6  # by which results may differ: other kernels of the optimizer round otherwise


class GpuBackend(Backend):
    """The simulated GPU."""

    def _device(self, kind: Kind, number: int) -> torch.device:  # noqa: ARG002
        return DEVICE

    @property
    def host(self) -> torch.device:
        """Main memory."""
        return HOST


class Looks(Wrapped):
    """Looks at its loss in each step."""

    def training(self, *arguments: Any) -> Sums:  # type: ignore[override]
        sums = super().training(*arguments)
        assert sums.loss.detach().item() < 1e9
        return sums


class Names(Wrapped):
    """Makes a tensor of numbers on the device in each step."""

    def training(self, *arguments: Any) -> Sums:  # type: ignore[override]
        sums = super().training(*arguments)
        return Sums(sums.loss * torch.tensor([1.0], device=sums.loss.device)[0], sums.count, sums.metrics)


FAULTS: dict[str, Callable[[Task], Task]] = {"": lambda task: task, "looks": Looks, "names": Names}


class Watch(Record):
    """Notes what was waited for up to the end of each step but the last, and so without the evaluation."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu, self.until = gpu, list[Counter[str]]()

    def progress(self, step: int, fraction: float) -> None:  # noqa: ARG002
        self.until.append(self._gpu.waits.copy())


def watched(name: str, fault: str = "", *, stream: bool = False) -> dict[str, Any]:
    """Return what was waited for by kind, from one row of metrics to the next."""
    config = narrow_config(name)
    config = config.replace(**getattr(examples().get(config.model), "OWN_OPTIMIZER", {}))
    config = config.replace(
        batch_size=16,
        grad_clip=1.0,
        ema=True,
        ema_decay=0.9,
        max_steps=STEPS,
        log_interval_steps=INTERVAL,
        eval_interval_steps=10**6,
        checkpoint_seconds=0,
        checkpoint_interval_steps=0,
        data_placement="stream" if stream else "resident",
    )
    data = data_of(config)
    plan = make_plan(config, CPU, data.facts)
    given = {"task": FAULTS[fault], "dtype": torch.float64}
    expected = train(small_job(config, plan, data, **given), Progress())
    with SimulatedGpu() as gpu:
        job = small_job(config, plan, data, backend=GpuBackend("cpu"), record=(watch := Watch(gpu)), **given)
        result = train(job, Progress())
    waits = watch.until[2 * INTERVAL - 1] - watch.until[INTERVAL - 1]
    assert plan.accumulation == 2
    assert abs(result["loss"] - expected["loss"]) < LOSS, "the device does not compute what the CPU does"
    return {"name": name, "waits": waits}


if __name__ == "__main__":
    base.PINNED.add(NAME)
    for each in sys.argv[1:]:
        place, _, added = each.partition("+")
        stream, fault = added == "stream", added.removeprefix("stream")
        print(json.dumps(watched(place, fault, stream=stream)), flush=True)
