"""Two ranks of which the second comes late: `gradient_wait_worker DIRECTORY` leaves DIRECTORY/0 of rank 0.

In its last step rank 1 begins to sleep when rank 0 has all its gradients.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from lib.devices.base import Backend
from lib.distributed import gradient_wait
from tests.e2e.ranks import fork_ranks
from tests.support.training import MemoryRecord, random_data, small_config, small_job, small_plan
from train.job import Progress
from train.loop import train

STEPS, LATE_SECONDS = 3, 0.3
CONFIG = small_config(max_steps=STEPS, log_interval_steps=1)
SUBJECT = random_data(CONFIG, shape=(1, 28, 28), train_size=16, test_size=4)


def work(backend: Backend) -> None:
    folder, readings = Path(sys.argv[1]), list[float]()
    gradients, counts = list[int](), list[int]()

    def clock() -> float:
        counts.append(len(gradients))
        readings.append(time.perf_counter())
        (folder / str(len(readings))).touch()  # two of a step: the first at the last gradient
        return readings[-1]

    job = small_job(CONFIG, small_plan(2, 2, world=2), SUBJECT, backend=backend, record=MemoryRecord())
    for weight in job.model.parameters():
        weight.register_post_accumulate_grad_hook(lambda _: gradients.append(1))
    if backend.is_main:
        gradient_wait.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
    training, batches = job.task.training, list[int]()

    def late(*arguments: object) -> object:
        batches.append(1)
        if not backend.is_main and len(batches) == 2 * STEPS:
            while not (folder / str(2 * STEPS - 1)).exists():
                time.sleep(0.01)
            time.sleep(LATE_SECONDS)
        return training(*arguments)  # type: ignore[arg-type]

    job.task.training = late  # type: ignore[method-assign, assignment]
    train(job, Progress())
    assert isinstance(job.record, MemoryRecord)
    waited = job.backend.waited_seconds()["gradient_wait"]
    shares = [row["gradient_wait"] for row in job.record.of_kind("train")]
    if backend.is_main:
        (folder / "found").write_text(json.dumps([waited, readings, shares, counts]))


if __name__ == "__main__":
    fork_ranks(2, work)
