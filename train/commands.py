"""The commands of `python -m train`: each from its arguments to an exit status."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lib import checkpoint, kconf
from lib.backend import Backend, is_out_of_memory, open_backend
from lib.config import Config, config_from_values, identity
from lib.console import Console
from lib.errors import ToolkitError, run_main
from lib.hardware import environment, probe
from lib.hyperparams import apply_hyperparams
from lib.launcher import become_worker, end_process, launch
from lib.plan import plan as decide
from lib.plan.show import show
from lib.plan.types import Hardware, Plan
from lib.rundir import RunDir, resolve_run
from train import loop
from train.loop import Job, Progress
from train.record import Record, RunRecord, SilentRecord, told
from train.setup import Subject, evaluation_part, make_job, open_subject
from train.stop import Stopped

T = TypeVar("T")


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
    if (launched := become_worker()) is not None:
        return _work(launched, root=root, runs=runs, started=started)
    order = _order(kconf.from_environment(root), root=root, runs=runs, started=started)

    def interrupted() -> RunDir | None:
        if order.config.resume == "never":
            return None
        same = identity(order.resolved.values)
        return RunDir.find_interrupted(runs, model=order.config.model, identity=same, say=_say)

    return _carry_out(order, interrupted)


def resume(name: str, *, root: Path, runs: Path, started: float) -> int:
    """Go on with run `name` ("": the newest that is not done) by the configuration that is stored in it."""
    if (launched := become_worker()) is not None:
        return _work(launched, root=root, runs=runs, started=started)
    run = resolve_run(runs, name, unfinished=True)

    def locked() -> RunDir:
        run.lock()
        return run

    return _carry_out(_order(_stored_configuration(run, root), root=root, runs=runs, started=started), locked)


def evaluate(name: str, *, root: Path, runs: Path, best: bool) -> int:
    """Evaluate the newest or the best checkpoint of run `name` as its configuration says."""
    run = resolve_run(runs, name)
    # One process and no training: no batch to plan, no training data to hold. Evaluation counts
    # every sample once, however many rows are taken at a time.
    config = dataclasses.replace(
        config_from_values(_stored_configuration(run, root).values),
        num_devices=1,
        hyper_param="manual",
        batch_size=_stored(run, "plan", Plan.from_json).micro_batch,
        gradient_accumulation=1,
        target_effective_batch=0,
        norm_batch=0,
        data_placement="stream",
    )
    found = checkpoint.load(run.checkpoints, which="best" if best else "latest", say=_say)
    if found is None:
        raise ToolkitError(f"{run.path} has no {'best ' if best else ''}checkpoint")
    subject = open_subject(config, root=root, say=_say)
    hardware = probe(config.device)
    plan = decide(config, hardware, dataclasses.replace(subject.facts, train_size=None))
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
            "data": case.subject.to_json(),
            **_of_this_machine(case),
        },
    )


def _of_this_machine(case: Case) -> dict[str, dict[str, Any]]:
    return {"plan": case.plan.to_json(), "hardware": case.hardware.to_json(), "env": environment()}


def _order(resolved: kconf.Resolved, *, root: Path, runs: Path, started: float) -> Order:
    config = config_from_values(resolved.values)
    return Order(resolved=resolved, config=config, root=root, runs=runs, started=started)


def _stored_configuration(run: RunDir, root: Path) -> kconf.Resolved:
    resolved = kconf.load(root=root, config_file=run.config)
    for notice in resolved.notices:
        _say(notice)
    if run.identity not in ("", identity(resolved.values)):
        _say(
            f"{run.config} is not what the run was made with: it was changed, or this version has new options"
        )
    return resolved


@contextmanager
def _reader_stays() -> Iterator[None]:
    """A reader of standard output that leaves is how a listing ends, but a run is not done by that."""
    try:
        yield
    except BrokenPipeError as error:
        raise ToolkitError(
            "nobody reads standard output any more", todo="make train > FILE starts, or goes on, without"
        ) from error


@_reader_stays()
def _carry_out(order: Order, find_run: Callable[[], RunDir | None]) -> int:
    """Plan, become several processes if the plan says so, and run the loop.

    find_run: the run to go on with, locked; None to begin a new one.
    """
    subject = open_subject(order.config, root=order.root, say=_say)
    run = find_run()
    hardware = probe(order.config.device)
    plan = _plan(order, subject, hardware, run)
    if plan.world > 1:
        if run is not None:
            run.release()  # for rank 0 to take
        payload = {
            "configuration": order.resolved.to_json(),
            "plan": plan.to_json(),
            "hardware": hardware.to_json(),
            "run": str(run.path) if run else None,
        }
        launch(payload, world=plan.world, cpu_count=hardware.cpu_count, arguments=sys.argv[1:])
    case = Case(order=order, subject=subject, hardware=hardware, plan=plan)
    return _as_main(case, Backend(plan.device), run)


def _work(launched: Mapping[str, Any], *, root: Path, runs: Path, started: float) -> int:
    """One of several processes that were launched with all that was asked and decided. Does not return."""
    resolved = kconf.Resolved.from_json(launched["configuration"])
    order = _order(resolved, root=root, runs=runs, started=started)
    plan, hardware = Plan.from_json(launched["plan"]), Hardware.from_json(launched["hardware"])
    subject = open_subject(order.config, root=order.root, say=lambda _: None)
    case = Case(order=order, subject=subject, hardware=hardware, plan=plan)
    backend = open_backend(plan.device, world=plan.world)

    @_reader_stays()
    def main() -> int:
        if not backend.is_main:
            return _train(case, backend, SilentRecord(), None)
        run = RunDir.open(Path(launched["run"])) if launched["run"] else None
        if run is not None:
            run.lock()
        return _as_main(case, backend, run)

    status = run_main(main)
    if status in (0, Stopped.exit_code):
        backend.close()  # not before rank 0 has saved
    end_process(status)


def _plan(order: Order, subject: Subject, hardware: Hardware, run: RunDir | None) -> Plan:
    """The plan for this machine; that of an interrupted run, if the machine is the one it was made for."""
    plan = None
    # Another cut into micro-batches would be the same mathematics, but not the same bits.
    if run is not None and _same_machine(_stored(run, "hardware", Hardware.from_json), hardware):
        plan = _stored(run, "plan", Plan.from_json)
        _say(f"Plan of {run.path}, for it was made for this machine")
    if plan is None:
        plan = apply_hyperparams(order.config, hardware=hardware, facts=subject.facts)
    show(plan, sys.stdout)
    return plan


def _stored(run: RunDir, name: str, read: Callable[[Mapping[str, Any]], T]) -> T:
    try:
        return read(run.read_json(name))
    except (TypeError, KeyError) as error:
        raise ToolkitError(
            f"the {name} of {run.path} cannot be read",
            why=f"it was written by another version ({error})",
            todo="start again with make train CONFIG_RESUME_NEVER=y",
        ) from error


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
    try:
        record.say(f"{'Going on with' if interrupted else 'Run'} {run.path}")
        if interrupted is not None:
            for name, content in _of_this_machine(case).items():
                run.write(name, content)
        return _train(case, backend, record, interrupted)
    except BaseException as error:
        _tell_end(run, error)
        raise
    finally:
        record.close()


def _tell_end(run: RunDir, error: BaseException) -> None:
    """Leave in a run what ended it, unless it was done by then or its directory is gone."""
    status = run.status()
    if status.state == "done" or not run.config.is_file():
        return
    if isinstance(error, Stopped):
        run.set_status("preempted", step=error.step, reason=str(error))
    elif isinstance(error, KeyboardInterrupt):
        run.set_status("preempted", step=status.step, reason="interrupted outside the loop of training")
    else:
        run.set_status("failed", step=status.step, reason=str(error) or type(error).__name__)


def _train(case: Case, backend: Backend, record: Record, interrupted: RunDir | None) -> int:
    config = case.order.config
    try:
        job = make_job(
            config, case.plan, case.subject, hardware=case.hardware, backend=backend, record=record
        )
        progress = _restore(job, interrupted)
        record.begin(progress.step, job.budget.total_steps)
        with job.train_loader, job.eval_loader:
            result = loop.train(job, progress)
    except (RuntimeError, MemoryError) as error:
        # The loop deals with training itself; here it is the set-up, an evaluation or a checkpoint.
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ToolkitError("out of memory outside the training step", why=reason) from error
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
