"""Findings for a report: what the task shows of a run's checkpoints, baselines, and memory over a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from lib.config import config_from_values
from lib.errors import CheckpointError
from lib.plan.types import Hardware, Plan, fixed_plan
from lib.reports.exhibits import Curve, to_json
from lib.reports.run_report import Findings
from lib.reports.series import MOST_POINTS, extremes
from lib.runs import checkpoint
from lib.runs.directory import RunDir
from train import loop
from train.job import TrainedModel
from train.planning.memory_estimate import trace_memory
from train.planning.run_plan import stored
from train.record import log
from train.stored_run import Restored, restore, stored_configuration
from train.tasks.base import baseline_of, exhibits_of, naive_loss_of
from train.training_data import cache_of


def find(run: RunDir, *, root: Path, steps: Sequence[int]) -> Findings:
    """Return the findings of the checkpoints of `steps`. Raises ToolkitError if none can be loaded."""
    restored = restore(str(run.path), root=root, runs=run.path, best=False)
    job, data = restored.job, restored.data
    show = exhibits_of(job.config.model)
    trained = TrainedModel(job, data.dataset, lambda: _each_checkpoint(restored, steps))
    with job.train_loader, job.eval_loader:
        shown = [] if show is None else show(trained)
    branches = data.facts.branches or ()
    flop = data.facts.flop_per_sample
    return Findings(
        steps=list(steps),
        step=restored.step,
        baselines=_baselines(restored, root),
        flop_per_sample=None if flop is None else flop + sum(branch.flop_per_sample for branch in branches),
        memory=_memory(run, restored, root),
        exhibits=[to_json(exhibit) for exhibit in shown],
    )


def _each_checkpoint(restored: Restored, steps: Sequence[int]) -> Iterator[int]:
    """Load the weights of each valid checkpoint and yield its step; report those that are damaged."""
    for step in steps:
        try:
            found = checkpoint.load(restored.run.checkpoints, which=step, log=log)
        except CheckpointError as error:
            log(f"The report leaves out step {step}: {error}")
            continue
        if found is not None:  # a run in progress may have removed it
            yield loop.load_state_dict(restored.job, {**found[1], "carry": None}).step


def _baselines(restored: Restored, root: Path) -> list[list[str]]:
    model, dataset = restored.job.config.model, restored.data.dataset
    naive_loss = naive_loss_of(model, dataset.spec)
    found = [] if naive_loss is None else [["uniform guess", f"training loss {naive_loss:.4f}"]]
    line = baseline_of(model, dataset, cache_dir=cache_of(root), log=log)
    return found if line is None else [*found, list(line.partition(": ")[::2])]


def _memory(run: RunDir, restored: Restored, root: Path) -> dict[str, object] | None:
    """Trace the memory of the run's own step; None where its plan has no prediction or shards the model."""
    plan = stored(run, "plan", Plan.from_json)
    if plan.memory is None or plan.strategy not in ("single", "ddp"):
        return None
    config = config_from_values(stored_configuration(run, root).values)
    traced = fixed_plan(
        "traced",
        device=plan.device,
        world=min(plan.world, 2),
        micro_batch=plan.micro_batch,
        accumulation=min(plan.accumulation, 2),  # a third micro-batch reuses the memory of the second
        norm_batch=plan.norm_batch,
        precision=plan.precision,
        channels_last=plan.channels_last,
    )
    hardware = stored(run, "hardware", Hardware.from_json)
    trace = trace_memory(config, traced, restored.data, hardware=hardware).trace
    sizes = list(accumulate(event.byte_count / 1e6 for event in trace.events))
    curve = Curve(
        title="Memory over two steps and an evaluation batch, predicted",
        note=f"Its highest point is {trace.peak_bytes / 1e6:,.1f} MB.",
        x="allocations and releases, in order",
        y="MB",
        lines=(("all tensors", tuple((place, sizes[place]) for place in extremes(sizes, MOST_POINTS))),),
    )
    return to_json(curve)
