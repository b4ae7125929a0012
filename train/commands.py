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
from lib.errors import ToolkitError
from lib.hardware import environment, probe
from lib.hyperparams import apply_hyperparams
from lib.plan.show import show
from lib.plan.types import Hardware, Plan
from lib.rundir import RunDir, identity, resolve_run
from train import loop
from train.loop import Job, Progress, Stopped
from train.record import Record, RunRecord, SilentRecord
from train.setup import Subject, make_job, open_subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One `train` or `resume`, with all that was asked."""

    resolved: kconf.Resolved
    config: Config
    root: Path
    runs: Path
    started: float  # time.monotonic() when the program began


def train(*, root: Path, runs: Path, started: float) -> int:
    """Train what .config says; go on with the same run if it was interrupted and RESUME allows it."""
    resolved = kconf.from_environment(root)
    order = Order(
        resolved=resolved, config=config_from_values(resolved.values), root=root, runs=runs, started=started
    )
    return _carry_out(order, lambda: _interrupted(order))


def resume(name: str, *, root: Path, runs: Path, started: float) -> int:
    """Go on with run `name` by the configuration that is stored in it."""
    run = resolve_run(runs, name)
    resolved = kconf.load(root=root, config_file=run.path / "config")
    order = Order(
        resolved=resolved, config=config_from_values(resolved.values), root=root, runs=runs, started=started
    )

    def locked() -> RunDir:
        run.lock()
        if run.status().state == "done":
            raise ToolkitError(f"{run.path} is done", todo="make train starts another run")
        return run

    return _carry_out(order, locked)


def evaluate(name: str, *, root: Path, runs: Path, which: str) -> int:
    """Evaluate a checkpoint ("latest" or "best") of run `name` on the part its configuration says."""
    run = resolve_run(runs, name)
    resolved = kconf.load(root=root, config_file=run.path / "config")
    # One process: evaluation counts every sample once however many there are.
    config = dataclasses.replace(config_from_values(resolved.values), num_devices=1)
    found = checkpoint.load(run.checkpoints, which="best" if which == "best" else "latest", say=_say)
    if found is None:
        raise ToolkitError(f"{run.path} has no checkpoint")
    subject = open_subject(config, root=root, say=_say)
    hardware = probe(config.device)
    plan = apply_hyperparams(config, verbose=False, hardware=hardware, facts=subject.facts)
    backend = open_backend(plan.device, world=1)
    job = make_job(config, plan, subject, hardware=hardware, backend=backend, record=SilentRecord())
    progress = loop.load_state_dict(job, found[1])
    result = loop.evaluate(job)
    print(f"{run.path}: {which} checkpoint, step {progress.step}: {told(result)} ({subject.judge})")
    return 0


def plan(*, root: Path) -> int:
    """Print what would be decided for this machine, and why."""
    resolved = kconf.from_environment(root)
    config = config_from_values(resolved.values)
    subject = open_subject(config, root=root, say=_say)
    show(apply_hyperparams(config, hardware=probe(config.device), facts=subject.facts), sys.stdout)
    return 0


def _interrupted(order: Order) -> RunDir | None:
    if order.config.resume == "never":
        return None
    return RunDir.find_interrupted(
        order.runs, model=order.config.model, identity=identity(order.resolved.values)
    )


def _carry_out(order: Order, find_run: Callable[[], RunDir | None]) -> int:
    """Plan, become several processes if the plan says so, and run the loop."""
    launched = launched_plan()
    if launched is None:
        subject = open_subject(order.config, root=order.root, say=_say)
        run = find_run()
        hardware = probe(order.config.device)
        plan = _plan(order, subject, hardware, run)
        if plan.world > 1:
            _launch(plan, hardware, run)
    else:
        plan, hardware = Plan.from_json(launched["plan"]), Hardware.from_json(launched["hardware"])
        subject = open_subject(order.config, root=order.root, say=lambda _: None)
        run = RunDir.open(Path(launched["run"])) if launched["run"] else None
    backend = open_backend(plan.device, world=plan.world)
    if launched is not None and run is not None and backend.is_main:
        run.lock()
    status = _with_record(order, subject, hardware, plan, backend, run)
    if backend.world > 1:
        backend.close()
        end_process(status)
    return status


def _plan(order: Order, subject: Subject, hardware: Hardware, run: RunDir | None) -> Plan:
    """The plan for this machine; that of an interrupted run, if the machine is the one it was made for."""
    plan = apply_hyperparams(order.config, hardware=hardware, facts=subject.facts)
    if run is not None and _same_machine(Hardware.from_json(run.read_json("hardware.json")), hardware):
        # Another cut into micro-batches is the same mathematics, but not the same bits.
        plan = Plan.from_json(run.read_json("plan.json"))
    show(plan, sys.stdout)
    return plan


def _same_machine(one: Hardware, other: Hardware) -> bool:
    """Whether they differ in nothing but how much memory is free."""
    return one.kind == other.kind and one.cpu_name == other.cpu_name and [
        device.name for device in one.devices
    ] == [device.name for device in other.devices]


def _launch(plan: Plan, hardware: Hardware, run: RunDir | None) -> None:
    if run is not None:
        run.release()  # for rank 0 to take
    payload = {
        "plan": plan.to_json(),
        "hardware": hardware.to_json(),
        "run": str(run.path) if run is not None else None,
    }
    launch(payload, world=plan.world, cpu_count=hardware.cpu_count, arguments=sys.argv[1:])


def _with_record(
    order: Order, subject: Subject, hardware: Hardware, plan: Plan, backend: Backend, run: RunDir | None
) -> int:
    if not backend.is_main:
        return _train(order, subject, hardware, plan, backend, SilentRecord(), None)
    going_on = run is not None
    if run is None:
        run = create_run(order.resolved, order.runs, subject=subject, plan=plan, hardware=hardware)
    record = open_record(run, order.config, started=order.started)
    record.say(f"{'Going on with' if going_on else 'Run'} {run.path}")
    try:
        return _train(order, subject, hardware, plan, backend, record, run if going_on else None)
    except Stopped as stopped:
        run.set_status("preempted", step=stopped.step, reason=str(stopped))
        raise
    except BaseException as error:
        run.set_status("failed", step=run.status().step, reason=str(error) or type(error).__name__)
        raise
    finally:
        record.close()


def create_run(
    resolved: kconf.Resolved, runs: Path, *, subject: Subject, plan: Plan, hardware: Hardware
) -> RunDir:
    """A new run directory that holds what was asked and what was decided."""
    model = resolved.values["MODEL"]
    assert isinstance(model, str)
    return RunDir.create(
        runs,
        model=model,
        identity=identity(resolved.values),
        files={
            "config": resolved.text,
            "defconfig": resolved.minimal,
            "values.json": dict(resolved.values),
            "origins.json": dict(resolved.origins),
            "plan.json": plan.to_json(),
            "hardware.json": hardware.to_json(),
            "data.json": subject.to_json(),
            "env.json": environment(),
        },
    )


def open_record(run: RunDir, config: Config, *, started: float) -> RunRecord:
    """The record that writes into `run`."""
    return RunRecord(run, Console(run.log), started=started, keep_last=config.keep_last)


def _train(
    order: Order,
    subject: Subject,
    hardware: Hardware,
    plan: Plan,
    backend: Backend,
    record: Record,
    interrupted: RunDir | None,
) -> int:
    job = make_job(order.config, plan, subject, hardware=hardware, backend=backend, record=record)
    progress = _restore(job, interrupted)
    record.begin(progress.step)
    with job.train_loader, job.eval_loader:
        result = loop.train(job, progress)
    if isinstance(record, RunRecord):
        record.finish(progress.step, seconds=progress.seconds, result=result, judge=subject.judge)
    return 0


def _restore(job: Job, interrupted: RunDir | None) -> Progress:
    """Bring every rank to the newest sound checkpoint that rank 0 finds."""
    path = job.backend.broadcast(interrupted.checkpoints if interrupted is not None else None)
    if path is None:
        return Progress()
    # Another rank reads only after rank 0 has verified which checkpoint it is.
    found = checkpoint.load(path, say=job.record.say) if job.backend.is_main else None
    step = job.backend.broadcast(found[0] if found is not None else None)
    if found is None and step is not None:
        found = checkpoint.load(path, which=step, say=job.record.say)
    progress = Progress() if found is None else loop.load_state_dict(job, found[1])
    job.record.say(f"Starting after step {progress.step}")
    return progress


def _say(text: str) -> None:
    print(text, flush=True)
