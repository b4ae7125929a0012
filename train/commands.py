"""The commands of `python -m train`: each from its arguments to an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lib import kconf
from lib.config import config_from_values
from lib.devices.accelerators import launch_variables
from lib.devices.backend import is_out_of_memory, open_backend
from lib.devices.base import Backend
from lib.devices.probe import environment, probe
from lib.distributed.launcher import become_worker, end_process, keep, launch
from lib.distributed.rendezvous import gathering_of
from lib.errors import ToolkitError, run_main
from lib.plan.types import ON_XLA, Hardware, Plan
from lib.runs import checkpoint
from lib.runs.console import Console
from lib.runs.directory import RunDir, resolve_run
from lib.runs.identity import identity
from lib.runs.sinks.opening import check_packages, open_sinks
from lib.tiers import with_tier
from train import loop
from train.build import make_job
from train.initial_weights import initial_weights
from train.job import Job, Progress
from train.multi_node import check_one_directory, launch_on_many, meet
from train.planning.run_plan import Order, plan_for
from train.record import Record, RunRecord, SilentRecord
from train.rerun import changes
from train.signals import Stopped, ended_once
from train.stored_run import say, stored_configuration
from train.summary import say_last_words, told_memory
from train.training_data import Subject, evaluation_part, open_subject, open_to_train
from train.upload import catch_up, check_storage, copier_of, interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An order, and what was found and decided for it."""

    order: Order
    subject: Subject
    hardware: Hardware
    plan: Plan


def train(asked: kconf.Resolved, *, root: Path, runs: Path, started: float) -> int:
    """Train what is asked; go on with the same run if it was interrupted and RESUME allows it."""
    resolved = with_tier(asked, root=root, say=say)
    order = _order(resolved, root=root, runs=runs, started=started)
    return _carry_out(order, lambda: _interrupted(order))


def _interrupted(order: Order) -> RunDir | None:
    """The run of this configuration to go on with, locked."""
    if order.config.resume == "never":
        return None
    return interrupted(order.config, order.resolved, runs=order.runs, say=say)


def resume(name: str, *, root: Path, runs: Path, started: float) -> int:
    """Go on with run `name` ("": the newest that is not done) by the configuration that is stored in it."""
    run = resolve_run(runs, name, unfinished=True)
    order = _order(stored_configuration(run, root), root=root, runs=runs, started=started)

    # Not before: of several machines that begin at once none may find it taken by another one.
    def taken() -> RunDir:
        run.lock()
        return catch_up(run, order.config, say=say)

    return _carry_out(order, taken)


def rerun(name: str, *, root: Path, runs: Path, started: float) -> int:
    """Train run `name` ("": the newest) again, in a directory of its own, by the configuration that is stored
    in it; what is different now is told."""
    run = resolve_run(runs, name)
    order = _order(stored_configuration(run, root), root=root, runs=runs, started=started)
    say(f"Again: {run.path}")
    return _carry_out(order, lambda: None, again=run)


def create_run(case: Case) -> RunDir:
    """A new run directory that holds what was asked and what was decided."""
    return RunDir.create(
        case.order.runs,
        model=case.order.config.model,
        identity=identity(case.order.resolved.in_effect),
        files={**_asked(case), "data": case.subject.to_json(), **_of_this_machine(case)},
    )


def _asked(case: Case) -> dict[str, str | dict[str, Any]]:
    resolved = case.order.resolved
    return {
        "config": resolved.text,
        "defconfig": resolved.minimal,
        "values": dict(resolved.values),
        "origins": dict(resolved.origins),
    }


def _of_this_machine(case: Case) -> dict[str, dict[str, Any]]:
    return {"plan": case.plan.to_json(), "hardware": case.hardware.to_json(), "env": environment()}


def _order(resolved: kconf.Resolved, *, root: Path, runs: Path, started: float) -> Order:
    config = config_from_values(resolved.values)
    return Order(resolved=resolved, config=config, root=root, runs=runs, started=started)


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
def _carry_out(order: Order, find_run: Callable[[], RunDir | None], *, again: RunDir | None = None) -> int:
    """Plan, become several processes if the plan says so, and run the loop.

    find_run: the run to go on with, locked; None to begin a new one.
    again:    an earlier run of the same configuration, to tell what is different.
    """
    gathering = gathering_of(nodes=order.config.dist_nnodes, endpoint=order.config.dist_endpoint)
    check_packages(order.config)
    check_storage(order.config)
    subject = open_to_train(order.config, root=order.root, say=say)
    if gathering is not None:
        launch_on_many(order.config, order.resolved, gathering)
    run = find_run()
    hardware = probe(order.config.device)
    plan = plan_for(order, subject, hardware, run)
    case = Case(order=order, subject=subject, hardware=hardware, plan=plan)
    if again is not None:
        _tell_changes(again, case)
    # No such device is given to a process in which memory was predicted: that made a backward pass.
    if plan.world > 1 or plan.device in ON_XLA:
        if run is not None:
            run.release()  # for rank 0 to take
        payload = {
            "configuration": order.resolved.to_json(),
            "plan": plan.to_json(),
            "hardware": hardware.to_json(),
            "run": str(run.path) if run else None,
        }
        launch(
            payload,
            world=plan.world,
            restarts=order.config.dist_max_restarts,
            cpu_count=hardware.cpu_count,
            arguments=sys.argv[1:],
            variables=launch_variables(plan.device, processes=plan.world),
        )
    return _as_main(case, Backend(plan.device, devices=plan.layout.devices_per_process), run)


def _tell_changes(again: RunDir, case: Case) -> None:
    lines = list(changes(again, now=_of_this_machine(case)))
    for line in lines or ["nothing: versions, machine and plan are the same"]:
        say(f"Different from {again.name}: {line}")


def work(*, root: Path, runs: Path, started: float) -> int:
    """One of several processes that were launched with all that was asked and decided. Does not return."""
    launched = become_worker()
    assert launched is not None, "nobody launched this process"
    resolved = kconf.Resolved.from_json(launched["configuration"])
    order = _order(resolved, root=root, runs=runs, started=started)
    subject = open_subject(order.config, root=order.root, say=lambda _: None)
    ended_well = ExitStack()

    @_reader_stays()
    def main() -> int:
        if launched["plan"] is None:
            case, backend, run = _as_one_of_many(order, subject, launched["hardware"])
        else:
            plan, hardware = Plan.from_json(launched["plan"]), Hardware.from_json(launched["hardware"])
            case = Case(order=order, subject=subject, hardware=hardware, plan=plan)
            backend = open_backend(plan.device, world=plan.world, devices=plan.layout.devices_per_process)
            run = RunDir.open(Path(launched["run"])) if launched["run"] else None
            if run is not None and backend.is_main:
                run.lock()
        ended_well.callback(backend.close)
        if not backend.is_main:
            keep(RunDir(Path(backend.broadcast(None))), own=False)
            return _train(case, backend, SilentRecord(), None)
        return _as_main(case, backend, run)

    status = run_main(main)
    if status in (0, Stopped.exit_code):
        ended_well.close()  # not before rank 0 has saved
    end_process(status)


def _as_one_of_many(
    order: Order, subject: Subject, known: Mapping[str, Any] | None
) -> tuple[Case, Backend, RunDir | None]:
    """What is decided where the processes of all machines have met; rank 0 gets the run to go on with."""
    backend, hardware = meet(order.config, known=known)
    check_one_directory(backend, order.runs)
    order = replace(order, config=replace(order.config, num_devices=backend.world))
    run = _interrupted(order) if backend.is_main else None
    decided = plan_for(order, subject, hardware, run, of_many=True) if backend.is_main else None
    plan = Plan.from_json(backend.broadcast(decided.to_json() if decided else None))
    return Case(order=order, subject=subject, hardware=hardware, plan=plan), backend, run


def _as_main(case: Case, backend: Backend, interrupted: RunDir | None) -> int:
    """Train as the rank that writes the run directory, and leave a true status in it."""
    run = interrupted or create_run(case)
    backend.broadcast(str(run.path))  # for the logs of other machines
    keep(run, own=True)
    record = RunRecord(
        run,
        Console(run.log),
        started=case.order.started,
        keep_last=case.order.config.keep_last,
        open_sinks=partial(open_sinks, case.order.config, run),
        copier=copier_of(run, case.order.config),
    )
    try:
        record.say(f"{'Going on with' if interrupted else 'Run'} {run.path}")
        if interrupted is not None:
            # On other devices, say: make resume is to go on with those.
            asked = _asked(case)
            if run.identity != identity(case.order.resolved.in_effect):
                del asked["values"]  # an older tree named the run by the hash of those that are there
            for name, content in (asked | _of_this_machine(case)).items():
                run.write(name, content)
            run.set_status("running", step=run.status().step)
        return _train(case, backend, record, interrupted)
    except BaseException as error:
        _tell_end(run, error)
        if not isinstance(error, KeyboardInterrupt):  # that ends at once
            record.broken_off()
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


@ended_once()
def _train(case: Case, backend: Backend, record: Record, interrupted: RunDir | None) -> int:
    config = case.order.config
    try:
        job = make_job(
            config,
            case.plan,
            case.subject,
            hardware=case.hardware,
            backend=backend,
            record=record,
            weights=initial_weights(config, case.order.root),
            whole_run=True,
        )
        progress = _restore(job, interrupted)
        record.begin(progress.step, job.budget.total_steps)
        with job.train_loader, job.eval_loader, told_memory(job, case.hardware):
            result = loop.train(job, progress)
        say_last_words(job, case.subject.dataset, root=case.order.root)
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
    if found is not None and job.carry is not None and found[1]["carry"] is None:
        job.record.say(
            "The checkpoint has no carry: every sample starts afresh, and the run is not the same to the bit"
        )
    job.record.say(f"Starting after step {progress.step}")
    return progress
