"""One probe run of a micro-batch, in a process of its own: its memory and speed."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from lib import atomic, kconf
from lib.config import config_from_values
from lib.devices.backend import is_out_of_memory, open_backend
from lib.devices.base import Backend
from lib.distributed.launcher import become_worker, end_process, launch
from lib.errors import OutOfMemory, ToolkitError
from lib.memory.peak import Peak, limit_main_memory
from lib.nn.model_code import ModelCode
from lib.plan.types import Hardware, Plan
from train import loop
from train.build import make_job
from train.job import Job, Progress, evaluation_sums
from train.record import Record
from train.training_data import open_training_data

WARM_UP_STEPS = 2  # the first creates the optimizer's state and compiles
MIN_STEPS, MAX_STEPS = 3, 5  # the median of which counts
LONG_SECONDS = 10.0  # after this many seconds of steps MIN_STEPS suffice


def run_probe(request: Path, *, root: Path) -> int:
    """Run the probe in the file `request` (autotune.py) and write the outcome beside it, as RANK.json.

    Starts several processes if the plan is for several devices.
    """
    content = json.loads(request.read_text(encoding="utf-8"))
    plan, hardware = Plan.from_json(content["plan"]), Hardware.from_json(content["hardware"])
    launched = become_worker()
    if launched is None and plan.world > 1:
        arguments = ["trial", str(request)]
        launch({}, world=plan.world, restarts=0, cpu_count=hardware.cpu_count, arguments=arguments)
    backend = open_backend(plan.device, world=plan.world, devices=plan.layout.devices_per_process)
    outcome = _outcome(content, plan, hardware, backend, root=root)
    atomic.write_text(request.with_name(f"{backend.rank}.json"), json.dumps(outcome))
    status = 0 if outcome["status"] == "ok" else 1
    if launched is not None:
        if status == 0:
            backend.close()
        end_process(status)
    return status


def _outcome(
    content: dict[str, Any], plan: Plan, hardware: Hardware, backend: Backend, *, root: Path
) -> dict[str, Any]:
    config = config_from_values(kconf.Resolved.from_json(content["configuration"]).values)
    # Running out of memory is to be reported, not retried with a smaller micro-batch.
    config = config.replace(oom_retry=False)
    try:
        data = open_training_data(config, root=root, log=lambda _: None)
        if plan.device == "cpu":
            limit_main_memory(content["usable_bytes"])
        peak = Peak(backend)
        job = make_job(config, plan, data, hardware=hardware, backend=backend, record=Record())
        with job.train_loader, job.eval_loader, ModelCode(config.model):
            seconds = step_seconds(job)
    except (RuntimeError, MemoryError, ToolkitError) as error:
        ran_out = isinstance(error, OutOfMemory) or is_out_of_memory(error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {"status": "out_of_memory" if ran_out else "failed", "reason": reason}
    if peak.retries():
        reason = f"the allocator had to release its cache {peak.retries()} times"
        return {"status": "out_of_memory", "reason": reason}
    return {"status": "ok", "need_bytes": peak.need_bytes(), "step_seconds": seconds}


def step_seconds(job: Job) -> float:
    """Return seconds per optimizer step, measured after an evaluation batch has fitted into memory, too."""
    progress = Progress()
    for _ in range(WARM_UP_STEPS):
        _seconds_of_step(job, progress)
    for _ in evaluation_sums(job):
        break
    seconds: list[float] = []
    spent = 0.0
    while len(seconds) < (MIN_STEPS if spent > LONG_SECONDS else MAX_STEPS):
        seconds.append(_seconds_of_step(job, progress))
        # Clocks differ between ranks, and all must make as many steps.
        (spent,) = job.backend.all_reduce_max((sum(seconds),))
    return statistics.median(seconds)


def _seconds_of_step(job: Job, progress: Progress) -> float:
    job.backend.synchronize()
    started = time.perf_counter()
    loop.optimizer_step(job, progress)
    job.backend.synchronize()
    progress.step += 1
    return time.perf_counter() - started
