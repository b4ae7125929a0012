"""The commands of `python -m train`: each from its arguments to an exit status."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lib import checkpoint, kconf
from lib.backend import Backend, end_process, launch, launched_plan, open_backend
from lib.config import Config, config_from_values
from lib.console import Console
from lib.errors import ToolkitError, run_main
from lib.hardware import environment, probe
from lib.hyperparams import apply_hyperparams
from lib.plan.show import show
from lib.plan.types import Hardware, Plan
from lib.rundir import RunDir, identity, resolve_run
from train import loop
from train.loop import Job, Progress
from train.record import Record, RunRecord, SilentRecord, told
from train.setup import Subject, evaluation_part, make_job, open_subject
from train.stop import Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was asked, and where from."""

    resolved: kconf.Resolved
    config: Config
    root: Path  # the source tree
    runs: Path
    started: float  # time.monotonic() when the program began


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An order, and what was found and decided for it."""

    order: Order
    subject: Subject
    hardware: Hardware
    plan: Plan


def train(*, root: Path, runs: Path, started: float) -> int:
    """Train what .config says; go on with the same run if it was interrupted and RESUME allows it."""
    order = _order(kconf.from_environment(root), root=root, runs=runs, started=started)

    def interrupted() -> RunDir | None:
        if order.config.resume == "never":
            return None
        same = identity(order.resolved.values)
        return RunDir.find_interrupted(runs, model=order.config.model, identity=same)

    return _carry_out(order, interrupted)


def resume(name: str, *, root: Path, runs: Path, started: float) -> int:
    """Go on with run `name` by the configuration that is stored in it."""
    run = resolve_run(runs, name)
    resolved = kconf.load(root=root, config_file=run.config)

    def locked() -> RunDir:
        run.lock()
        if run.status().state == "done":
            raise ToolkitError(f"{run.path} is done", todo="make train starts another run")
        return run

    return _carry_out(_order(resolved, root=root, runs=runs, started=started), locked)


def evaluate(name: str, *, root: Path, runs: Path, best: bool) -> int:
    """Evaluate the newest or the best checkpoint of run `name` as its configuration says."""
    run = resolve_run(runs, name)
    resolved = kconf.load(root=root, config_file=run.config)
    # One process: evaluation counts every sample once however many there are.
    config = dataclasses.replace(config_from_values(resolved.values), num_devices=1)
    found = checkpoint.load(run.checkpoints, which="best" if best else "latest", say=_say)
    if found is None:
        raise ToolkitError(f"{run.path} has no checkpoint")
    subject = open_subject(config, root=root, say=_say)
    hardware = probe(config.device)
    plan = apply_hyperparams(config, verbose=False, hardware=hardware, facts=subject.facts)
    backend = open_backend(plan.device, world=1)
    job = make_job(config, plan, subject, hardware=hardware, backend=backend, record=SilentRecord())
    step = loop.load_state_dict(job, found[1]).step
    with job.train_loader, job.eval_loader:
        result = loop.evaluate(job)
    print(f"{run.path}, step {step}: {told(result)} ({evaluation_part(config, subject.dataset)})")
    return 0


def plan(*, root: Path) -> int:
    """Print what would be decided for this machine, and why."""
    config = config_from_values(kconf.from_environment(root).values)
    subject = open_subject(config, root=root, say=_say)
    show(apply_hyperparams(config, hardware=probe(config.device), facts=subject.facts), sys.stdout)
    return 0


def create_run(case: Case) -> RunDir:
    """A new run directory that holds what was asked and what was decided."""
    resolved = case.order.resolved
    return RunDir.create(
        case.order.runs,
        model=case.order.config.model,
        identity=identity(resolved.values),
        files={
            "config": resolved.text,
            "defconfig": resolved.minimal,
            "values": dict(resolved.values),
            "origins": dict(resolved.origins),
            "plan": case.plan.to_json(),
            "hardware": case.hardware.to_json(),
            "data": case.subject.to_json(),
            "env": environment(),
        },
    )


def _order(resolved: kconf.Resolved, *, root: Path, runs: Path, started: float) -> Order:
    config = config_from_values(resolved.values)
    return Order(resolved=resolved, config=config, root=root, runs=runs, started=started)


def _carry_out(order: Order, find_run: Callable[[], RunDir | None]) -> int:
    """Plan, become several processes if the plan says so, and run the loop.

    find_run: the run to go on with, locked; None to begin a new one.
    """
    launched = launched_plan()
    if launched is not None:
        return _work(
            order, Hardware.from_json(launched["hardware"]), Plan.from_json(launched["plan"]), launched["run"]
        )
    for notice in order.resolved.notices:
        _say(notice)
    subject = open_subject(order.config, root=order.root, say=_say)
    run = find_run()
    hardware = probe(order.config.device)
    plan = _plan(order, subject, hardware, run)
    if plan.world > 1:
        if run is not None:
            run.release()  # for rank 0 to take
        payload = {
            "plan": plan.to_json(),
            "hardware": hardware.to_json(),
            "run": str(run.path) if run else None,
        }
        launch(payload, world=plan.world, cpu_count=hardware.cpu_count, arguments=sys.argv[1:])
    case = Case(order=order, subject=subject, hardware=hardware, plan=plan)
    return _as_main(case, Backend(plan.device), run)


def _work(order: Order, hardware: Hardware, plan: Plan, run_path: str | None) -> int:
    """One of several processes that were launched with a plan. Does not return."""
    subject = open_subject(order.config, root=order.root, say=lambda _: None)
    case = Case(order=order, subject=subject, hardware=hardware, plan=plan)
    backend = open_backend(plan.device, world=plan.world)

    def main() -> int:
        if not backend.is_main:
            return _train(case, backend, SilentRecord(), None)
        run = RunDir.open(Path(run_path)) if run_path else None
        if run is not None:
            run.lock()
        return _as_main(case, backend, run)

    status = run_main(main)
    if status == 0:
        backend.close()
    end_process(status)


def _plan(order: Order, subject: Subject, hardware: Hardware, run: RunDir | None) -> Plan:
    """The plan for this machine; that of an interrupted run, if the machine is the one it was made for."""
    plan = apply_hyperparams(order.config, hardware=hardware, facts=subject.facts)
    if run is not None and _same_machine(Hardware.from_json(run.read_json("hardware")), hardware):
        # Another cut into micro-batches is the same mathematics, but not the same bits.
        plan = Plan.from_json(run.read_json("plan"))
    show(plan, sys.stdout)
    return plan


def _same_machine(one: Hardware, other: Hardware) -> bool:
    """Whether they differ in nothing but how much memory is free."""
    return (one.kind, one.cpu_name, [device.name for device in one.devices]) == (
        other.kind,
        other.cpu_name,
        [device.name for device in other.devices],
    )


def _as_main(case: Case, backend: Backend, interrupted: RunDir | None) -> int:
    """Train as the rank that writes the run directory, and leave a true status in it."""
    run = interrupted or create_run(case)
    record = RunRecord(
        run, Console(run.log), started=case.order.started, keep_last=case.order.config.keep_last
    )
    record.say(f"{'Going on with' if interrupted else 'Run'} {run.path}")
    try:
        return _train(case, backend, record, interrupted)
    except Stopped as stopped:
        run.set_status("preempted", step=stopped.step, reason=str(stopped))
        raise
    except BaseException as error:
        run.set_status("failed", step=run.status().step, reason=str(error) or type(error).__name__)
        raise
    finally:
        record.close()


def _train(case: Case, backend: Backend, record: Record, interrupted: RunDir | None) -> int:
    config = case.order.config
    job = make_job(config, case.plan, case.subject, hardware=case.hardware, backend=backend, record=record)
    progress = _restore(job, interrupted)
    record.begin(progress.step, job.budget.total_steps)
    with job.train_loader, job.eval_loader:
        result = loop.train(job, progress)
    part = evaluation_part(config, case.subject.dataset)
    record.finish(progress.step, seconds=progress.seconds, result=result, part=part)
    return 0


def _restore(job: Job, interrupted: RunDir | None) -> Progress:
    """Bring every rank to the newest sound checkpoint that rank 0 finds."""
    path = job.backend.broadcast(interrupted.checkpoints if interrupted is not None else None)
    if path is None:
        return Progress()
    found = checkpoint.load(path, say=job.record.say) if job.backend.is_main else None
    # The other ranks read only after rank 0 has verified which checkpoint it is.
    step = job.backend.broadcast(found[0] if found is not None else None)
    if found is None and step is not None:
        found = checkpoint.load(path, which=step, say=job.record.say)
    progress = Progress() if found is None else loop.load_state_dict(job, found[1])
    job.record.say(f"Starting after step {progress.step}")
    return progress


def _say(text: str) -> None:
    print(text, flush=True)
