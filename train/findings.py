"""Findings for a report: what the task shows of a run's checkpoints, and the memory of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from lib.config import config_from_values
from lib.errors import CheckpointError
from lib.plan.fitting import step_settings
from lib.plan.types import Hardware, Plan
from lib.plugins import TASKS
from lib.reports.page import Block, curve
from lib.reports.run_report import Findings
from lib.runs import checkpoint
from lib.runs.directory import RunDir
from lib.runs.index import stored
from train import loop
from train.planning.memory_estimate import MemoryTraces
from train.record import log
from train.stored_run import Restored, restore, stored_configuration
from train.tasks.naive_loss import naive_loss_of

MOST_CHECKPOINTS = 4  # that the task shows


def find(run: RunDir, *, root: Path) -> Findings:
    """Return the findings of the checkpoints that there are. Raises ToolkitError if none can be loaded."""
    steps = run.checkpoint_steps
    restored = restore(str(run.path), root=root, runs=run.path, best=False)
    job, data = restored.job, restored.data
    home = TASKS.home(job.config.task)
    exhibits: list[Block] = []
    if (home / "exhibits.py").is_file():  # otherwise the task has nothing to show
        module = TASKS.module(job.config.task, "exhibits")
        with job.train_loader, job.eval_loader:
            exhibits = module.exhibits(job, data.dataset, _checkpoints(restored, steps))
    return {
        "steps": steps,
        "step": restored.step,
        "naive_loss": naive_loss_of(job.config, data.dataset.spec),
        "memory": _memory(run, restored, root),
        "exhibits": exhibits,
    }


def _checkpoints(restored: Restored, steps: Sequence[int]) -> Iterator[int]:
    """Load the weights of valid checkpoints, evenly from first to last, and yield the step of each."""
    last, gaps = len(steps) - 1, MOST_CHECKPOINTS - 1
    for step in dict.fromkeys(steps[number * last // gaps] for number in range(MOST_CHECKPOINTS)):
        try:
            found = checkpoint.load(restored.run.checkpoints, which=step, log=log)
        except CheckpointError as error:
            log(f"The report leaves out step {step}: {error}")
            continue
        if found is not None:  # a run in progress may have removed it
            yield loop.load_state_dict(restored.job, found[1], to_train=False).step


def _memory(run: RunDir, restored: Restored, root: Path) -> Block | None:
    """Trace the memory of the run's own step; None where its plan has no prediction or shards the model."""
    plan = stored(run, "plan", Plan.from_json)
    if plan.memory is None or plan.strategy not in ("single", "ddp"):
        return None
    config = config_from_values(stored_configuration(run, root).values)
    hardware = stored(run, "hardware", Hardware.from_json)
    trace = MemoryTraces(config, restored.data).of(step_settings(plan), hardware).trace
    sizes = list(accumulate(byte_count / 1e6 for _, byte_count in trace.events))
    return curve(
        "Predicted memory over two steps and an evaluation batch, in MB",
        {"all tensors": enumerate(sizes)},
        x="allocations and releases, in order",
        note=f"Its highest point is {trace.peak_bytes / 1e6:,.1f} MB.",
    )
