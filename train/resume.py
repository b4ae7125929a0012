"""Resume an interrupted run: its plan where that still holds, and its latest checkpoint.

`lib.runs.directory` finds the run, and `train.commands` starts it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.config import Config
from lib.errors import CheckpointError, PlanError, os_errors
from lib.plan.placement import place
from lib.plan.types import Hardware, Plan
from lib.runs import checkpoint
from lib.runs.directory import RunDir, checkpoint_step
from lib.runs.identity import changed, stored_digests, with_former
from lib.runs.index import objects_of, stored
from lib.units import counted
from train import loop
from train.job import Job, Progress
from train.record import log


def stored_plan(run: RunDir, config: Config, hardware: Hardware) -> Plan | None:
    """Return the plan of `run`, if it is for this machine and the requested number of devices."""
    if not same_machine(stored(run, "hardware", Hardware.from_json), hardware):
        return None
    plan = stored(run, "plan", Plan.from_json)
    if plan.layout.devices != place(config, hardware).world.value:
        return None
    requested, stages = config.dist_strategy, config.launch.dist_stages
    several = plan.layout.devices > 1 or plan.strategy == "sequential"
    by_hand = several and requested != "auto"
    if by_hand and (plan.strategy != requested or plan.shard != (stages or plan.shard)):
        return None
    # Another split into micro-batches would be the same mathematics, but not bit-identical.
    log(f"Plan: that of {run.path}, made for this machine")
    return plan


def check_effective_batch(run: RunDir, plan: Plan, *, of_many: bool) -> None:
    """Raise PlanError where `run`, trained with another effective batch, cannot resume with `plan`."""
    before = stored(run, "plan", Plan.from_json)
    if before.effective_batch == plan.effective_batch:
        return
    # Several nodes resume from a checkpoint whenever one joins or leaves.
    anew = "without that directory" if of_many else "with make train CONFIG_RESUME_NEVER=y"
    raise PlanError(
        f"{run.path} was trained with {before.effective_batch} samples a step, and now it would be "
        f"{plan.effective_batch}",
        why=plan.reasons["effective_batch"],
        todo=f"resume with {counted(before.layout.devices, 'device')}, or start a new run {anew}",
    )


def same_machine(one: Hardware, other: Hardware) -> bool:
    """True if they differ only in the amount of free memory."""
    return (one.kind, one.cpu_name, [device.name for device in one.devices]) == (
        other.kind,
        other.cpu_name,
        [device.name for device in other.devices],
    )


def load_latest(job: Job, checkpoints: Path) -> Progress:
    """Load the latest valid checkpoint into `job` on every rank; return its progress, or that of no step.

    Raises CheckpointError if there were checkpoints and none is left.
    """
    todo = "remove that directory to start again"
    found = checkpoint.load(checkpoints, log=job.record.log, ranks=job.backend, todo=todo)
    if lost := job.backend.broadcast(_lost(checkpoints) if job.backend.is_main else None):
        if found is None:
            raise CheckpointError(
                f"no checkpoint in {checkpoints}", why=f"{lost}, the latest, is gone", todo=todo
            )
        job.record.log(f"warning: checkpoint {lost}, the latest, is gone")
    progress = Progress() if found is None else loop.load_state_dict(job, found[1])
    if found is not None and job.carry is not None and found[1]["carry"] is None:
        job.record.log(
            "The checkpoint has no carry: every sample starts anew, and the run is not bitwise reproducible"
        )
    job.record.at_resume(found is not None)
    job.record.log(f"Starting after step {progress.step}")
    return progress


def _lost(checkpoints: Path) -> str:
    """Return the name of the latest checkpoint if it was removed; "" if it is there, or none was saved."""
    latest = checkpoints / "latest"
    with os_errors("read"):
        name = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
        step = checkpoint_step(name)
        return "" if step is None or step in checkpoint.steps(checkpoints) else name


def note_code(run: RunDir, facts: Mapping[str, Any], is_loaded: bool) -> None:
    """Write the plugins.json of a run that resumes; log where its code was other code before.

    facts: of the code now (`lib.nn.model_code.code_facts`). is_loaded: steps were made before.
    """
    found = with_former(facts, objects_of(run, "plugins")[0]["plugins"] if is_loaded else {})
    if parts := changed(stored_digests(found), stored_digests(facts)):
        what = f"NOTE: the code of its {parts} was changed after the run began"
        log(f"{what}: its further steps train by the code of today; CONFIG_RESUME_NEVER=y begins a new run")
    run.write("plugins", found)
