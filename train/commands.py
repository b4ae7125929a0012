"""Commands of `python -m train` that train a run: each takes its arguments and returns an exit status.

What a run on one device with local files does not use is imported where an option or the plan asks for it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.backend import open_backend
from lib.devices.base import Backend
from lib.devices.probe import environment, main_memory, probe
from lib.distributed.launcher import become_worker, end_process, keep, launch
from lib.errors import ToolkitError, interrupted_as, run_main
from lib.memory.peak import resident_bytes, training_peak
from lib.nn.model_code import code_facts
from lib.plan.show import plain_text
from lib.plan.types import STATIC_SHAPES, Hardware, Plan
from lib.runs.console import Console
from lib.runs.directory import RunDir, resolve_run
from lib.runs.identity import identity, stored_weight_facts, trains, weight_facts
from train import loop
from train.build import make_job
from train.job import Job, Progress, checkpoint_format, early_stop, saves_beside
from train.planning.run_plan import RunRequest, plan_for, refuse
from train.record import Record, RunRecord, log
from train.signals import Rescaled, Stopped, ended_once, interrupted_text
from train.summary import eval_part, log_speed, log_summary, next_commands, report_memory, resume_command
from train.training_data import TrainingData, open_to_train, open_training_data

if TYPE_CHECKING:
    from lib.runs.sinks import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A requested run with its data, hardware and plan."""

    request: RunRequest
    data: TrainingData
    hardware: Hardware
    plan: Plan


def train(requested: kconf.Resolved, *, root: Path, runs: Path, started: float, verbose: bool = False) -> int:
    """Train the requested configuration; resume its run if it was interrupted and RESUME allows it."""
    resolved = requested
    if requested.values["TIER"] != "none":
        from lib.tiers import with_tier

        resolved = with_tier(requested, root=root, log=log)
    request = _request(resolved, root=root, runs=runs, started=started, verbose=verbose)
    return _plan_and_train(request)


def _to_resume(request: RunRequest, given: RunDir | None) -> RunDir | None:
    """Return the run to resume, locked: `given`, or else an interrupted one of this configuration."""
    config, resolved, upload = request.config, request.resolved, _upload(request.config)
    if given is not None:
        given.lock()
        if upload is not None:
            upload.catch_up(given, config, log=log)
        return given
    if config.resume == "never":
        return None
    if upload is not None:
        found: RunDir | None = upload.interrupted(config, resolved, runs=request.runs, log=log)
        return found
    same = partial(trains, resolved=resolved)
    return RunDir.find_interrupted(request.runs, model=config.model, is_same=same, log=log)


def _upload(config: Config) -> ModuleType | None:
    """Return `train.upload` where copies of runs are requested: other runs do without its imports."""
    if not config.checkpoints.checkpoint_url:
        return None
    from train import upload

    return upload


def resume(name: str, *, root: Path, runs: Path, started: float, verbose: bool = False) -> int:
    """Resume run `name` ("": the newest that is not done) with its stored configuration."""
    run = resolve_run(runs, name, unfinished=True)
    request = _request_of(run, root=root, runs=runs, started=started, verbose=verbose)
    return _plan_and_train(request, resumed=run)


def rerun(name: str, *, root: Path, runs: Path, started: float, verbose: bool = False) -> int:
    """Train run `name` ("": the newest) again with its stored configuration, in a new run directory.

    Versions, hardware and decisions that differ are logged.
    """
    run = resolve_run(runs, name)
    request = _request_of(run, root=root, runs=runs, started=started, verbose=verbose)
    log(f"Again: {run.path}")
    return _plan_and_train(request, original=run)


def create_run(planned: PlannedRun) -> RunDir:
    """Create the run directory, with the configuration, the plan and the environment."""
    data = {"data": planned.data.to_json(), "preprocess": planned.data.preprocess()}
    files = {**_configuration_files(planned), **_environment_files(planned), **data}
    model, name = planned.request.config.model, identity(planned.request.resolved.in_effect)
    return RunDir.create(planned.request.runs, model=model, identity=name, files=files)


def _configuration_files(planned: PlannedRun) -> dict[str, str | dict[str, Any]]:
    resolved = planned.request.resolved
    return {
        "config": resolved.text,
        "defconfig": resolved.minimal,
        "values": dict(resolved.values),
        "origins": dict(resolved.origins),
    }


def _environment_files(planned: PlannedRun, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """known: facts of the weights, where the run has stored them: by now they may be others."""
    config = planned.request.config
    return {
        "plan": planned.plan.to_json(),
        "hardware": planned.hardware.to_json(),
        "env": environment() | dict(known or weight_facts(planned.request.resolved.in_effect)),
        "plugins": code_facts(config.model, config.task, config.dataset),
    }


def _request(
    resolved: kconf.Resolved, *, root: Path, runs: Path, started: float, verbose: bool = False
) -> RunRequest:
    config = config_from_values(resolved.values)
    return RunRequest(
        resolved=resolved, config=config, root=root, runs=runs, started=started, verbose=verbose
    )


def _request_of(run: RunDir, *, root: Path, runs: Path, started: float, verbose: bool = False) -> RunRequest:
    from train.stored_run import stored_configuration

    return _request(stored_configuration(run, root), root=root, runs=runs, started=started, verbose=verbose)


@interrupted_as("interrupted before training began; the same command begins again")
def _plan_and_train(
    request: RunRequest, *, original: RunDir | None = None, resumed: RunDir | None = None
) -> int:
    """Plan, launch several processes if the plan says so, and train.

    original: an earlier run of the same configuration, to train again and log differences from.
    resumed: the run to resume; by default an interrupted one of this configuration.
    """
    config, rendezvous = request.config, None
    if config.dist_nnodes != "1" or config.launch.dist_endpoint:
        from lib.distributed.rendezvous import rendezvous_of

        rendezvous = rendezvous_of(nodes=config.dist_nnodes, endpoint=config.launch.dist_endpoint)
    if _has_sinks(config):
        from lib.runs.sinks import check_packages

        check_packages(config)
    if (upload := _upload(config)) is not None:
        upload.check_storage(config)
    check: Callable[..., None] = refuse
    if rendezvous is not None:
        from train.multi_node import launch_multi_node, refusal_on_nodes

        check = refusal_on_nodes(config, rendezvous, again=original is not None)
    data = open_to_train(config, root=request.root, log=log, refuse=check)
    if rendezvous is not None:
        launch_multi_node(config, request.resolved, rendezvous, run=resumed)
    # Locked late: nodes that start at once must not find the run locked by each other.
    run = None if original is not None else _to_resume(request, resumed)
    hardware = probe(config.device)
    plan = plan_for(request, data, hardware, run)
    planned = PlannedRun(request=request, data=data, hardware=hardware, plan=plan)
    if original is not None:
        from train.stored_run import log_differences

        log_differences(original, now=_environment_files(planned), or_none=True)
    # Such devices need a new process: predicting memory has made a backward pass in this one.
    if plan.world > 1 or plan.device in STATIC_SHAPES:
        from lib.devices.accelerators import launch_variables

        if run is not None:
            run.release()  # for rank 0 to take
        payload = {
            "configuration": request.resolved.to_json(),
            "plan": plan.to_json(),
            "hardware": hardware.to_json(),
            "run": str(run.path) if run else None,
        }
        launch(
            payload,
            world=plan.world,
            restarts=config.launch.dist_max_restarts,
            cpu_count=hardware.cpu_count,
            arguments=sys.argv[1:],
            variables=launch_variables(plan.device, processes=plan.world),
        )
    return _train_as_rank_0(planned, Backend(plan.device, devices=plan.layout.devices_per_process), run)


def work(*, root: Path, runs: Path, started: float, verbose: bool = False) -> int:
    """Train as one of several launched processes, which got the plan by `launch`. Does not return."""
    launched = become_worker()
    assert launched is not None, "this process was not launched"
    resolved = kconf.Resolved.from_json(launched["configuration"])
    request = _request(resolved, root=root, runs=runs, started=started, verbose=verbose)
    data = open_training_data(request.config, root=request.root, log=lambda _: None)
    on_success = ExitStack()

    def main() -> int:
        if launched["plan"] is None:
            planned, backend, run = _plan_after_rendezvous(request, data, launched)
        else:
            plan, hardware = Plan.from_json(launched["plan"]), Hardware.from_json(launched["hardware"])
            planned = PlannedRun(request=request, data=data, hardware=hardware, plan=plan)
            backend = open_backend(plan.device, world=plan.world, devices=plan.layout.devices_per_process)
            run = RunDir.open(Path(launched["run"])) if launched["run"] else None
            if run is not None and backend.is_main:
                run.lock()
        on_success.callback(backend.close)
        if not backend.is_main:
            keep(RunDir(Path(backend.broadcast(None))), own=False)
            return _train(planned, backend, Record(), None)
        return _train_as_rank_0(planned, backend, run)

    status = run_main(main)
    if status in (0, Stopped.exit_code):
        on_success.close()  # not before rank 0 has saved
    end_process(status)


def _plan_after_rendezvous(
    request: RunRequest, data: TrainingData, launched: Mapping[str, Any]
) -> tuple[PlannedRun, Backend, RunDir | None]:
    """Plan with the processes of all nodes; returns the run to resume on rank 0."""
    from train.multi_node import check_shared_directory, join_rendezvous

    backend, hardware = join_rendezvous(request.config, known=launched["hardware"])
    given = RunDir.open(Path(launched["run"])) if launched["run"] else None
    check_shared_directory(backend, request.runs if given is None else given.path.parents[1])
    request = replace(request, config=request.config.replace(num_devices=backend.world))
    run, decided = None, None
    if backend.is_main:
        run = _to_resume(request, given)
        decided = plan_for(request, data, hardware, run)
    plan = Plan.from_json(backend.broadcast(decided.to_json() if decided else None))
    return PlannedRun(request=request, data=data, hardware=hardware, plan=plan), backend, run


def _train_as_rank_0(planned: PlannedRun, backend: Backend, interrupted: RunDir | None) -> int:
    """Train as the rank that writes the run directory, and record there how the run ended."""
    run = interrupted or create_run(planned)
    backend.broadcast(str(run.path))  # for the rank logs of other nodes
    keep(run, own=True)
    config = planned.request.config
    upload = _upload(config)
    record = RunRecord(
        run,
        Console(run.log, memory_bytes=lambda: backend.peak_memory_bytes() or resident_bytes("VmHWM")),
        started=planned.request.started,
        keep_last=config.checkpoints.keep_last,
        open_sinks=partial(_open_sinks, config, run),
        copier=None if upload is None else upload.Copier(run, config),
        utilization=backend.utilization,
        peak_memory=training_peak(backend),
    )
    try:
        record.log(f"{'Resuming' if interrupted else 'Run'} {run.path}")
        record.console.write_log(plain_text(planned.plan))
        if interrupted is not None:
            from train.resume import note_code
            from train.stored_run import log_differences

            # The configuration may have changed where that is allowed, such as the number of devices.
            requested = _configuration_files(planned)
            if run.identity != identity(planned.request.resolved.in_effect):
                del requested["values"]  # the identity of an older version is the hash of the stored values
            now = _environment_files(planned, stored_weight_facts(run))
            plugins = now.pop("plugins")
            log_differences(run, now={"plugins": plugins})
            record.at_resume = partial(note_code, run, plugins)  # its checkpoint may not fit
            for name, content in (requested | now).items():
                run.write(name, content)
            run.set_status("running", step=run.status().step)
        try:
            status = _train(planned, backend, record, interrupted)
        except Stopped as error:
            raise Stopped(error.number, error.step, command=resume_command(run.path)) from error
        if run.path.parents[1].name == "runs":  # make has no name for another directory
            record.log(next_commands(run.path, config, planned.data.dataset, root=planned.request.root))
        return status
    except KeyboardInterrupt as error:  # it ends at once
        _log_end(run, error)
        record.console.write_log(text := interrupted_text(run.status(), resume_command(run.path)))
        raise KeyboardInterrupt(text) from error
    except BaseException as error:
        _log_end(run, error)
        if not isinstance(error, ToolkitError):  # it may be reported by its last line
            record.console.write_log(traceback.format_exc())
        record.copy_final_status()
        raise
    finally:
        record.close()


def _log_end(run: RunDir, error: BaseException) -> None:
    """Set the status of a run by the error that ended it, unless it is done or its directory is gone."""
    status = run.status()
    if status.state == "done" or not run.config.is_file():
        return
    if isinstance(error, Stopped | Rescaled):
        run.set_status("preempted", step=error.step, reason=str(error))
    elif isinstance(error, KeyboardInterrupt):
        run.set_status("preempted", step=status.step, reason="interrupted outside the training loop")
    else:
        named = "" if isinstance(error, ToolkitError) else f"{type(error).__name__}: "  # a KeyError is 3
        run.set_status("failed", step=status.step, reason=f"{named}{error}".rstrip(": "))


@ended_once()
def _train(planned: PlannedRun, backend: Backend, record: Record, interrupted: RunDir | None) -> int:
    config, weights = planned.request.config, None
    if config.weights.initial_weights:
        from train.initial_weights import initial_weights

        weights = initial_weights(config, planned.request.root)
    try:
        job = make_job(
            config,
            planned.plan,
            planned.data,
            hardware=planned.hardware,
            backend=backend,
            record=record,
            weights=weights,
            whole_run=True,
        )
        _choose_checkpoints(job)
        progress = _progress(job, interrupted)
        record.begin(progress.step, job.budget.total_steps)
        with job.train_loader, job.eval_loader, report_memory(job, planned.hardware):
            result = loop.train(job, progress)
    except (RuntimeError, MemoryError) as error:
        # The loop handles training steps; this is the set-up, an evaluation or a checkpoint.
        reason = loop.reason_if_out_of_memory(error)
        raise ToolkitError("out of memory outside the training step", why=reason) from error
    part = eval_part(config, planned.data.dataset)
    speed = partial(log_speed, job, planned.data, planned.hardware, step=progress.step)
    summary = partial(log_summary, job, planned.data.dataset, root=planned.request.root)
    ended: dict[str, Any] = {"part": part, "reason": early_stop(job, progress), "reports": (speed, summary)}
    record.finish(progress.step, seconds=progress.seconds, result=result, **ended)
    return 0


def _has_sinks(config: Config) -> bool:
    return config.sinks.sink_tensorboard or config.sinks.sink_wandb or config.sinks.sink_trackio


def _open_sinks(config: Config, run: RunDir) -> Sequence[Sink]:
    if not _has_sinks(config):
        return ()
    from lib.runs.sinks import open_sinks

    return open_sinks(config, run)


def _choose_checkpoints(job: Job) -> None:
    """Choose on rank 0 for all ranks, and log the choice where there is one."""
    folder, beside = None, False
    if isinstance(job.record, RunRecord):
        free_bytes = main_memory("").free_bytes
        is_sharded, format_and_reason = checkpoint_format(job, free_bytes=free_bytes)
        beside, beside_and_reason = saves_beside(job, free_bytes=free_bytes, is_sharded=is_sharded)
        for line in filter(None, (format_and_reason, beside_and_reason)):
            job.record.log(f"Checkpoints: {line}")
        folder = job.record.run.checkpoints if is_sharded else None
    job.shard_directory, job.saves_beside = job.backend.broadcast((folder, beside))


def _progress(job: Job, interrupted: RunDir | None) -> Progress:
    """Return where training begins, on every rank by what rank 0 finds."""
    path = job.backend.broadcast(interrupted.checkpoints if interrupted is not None else None)
    if path is None:
        return Progress()
    from train.resume import load_latest

    return load_latest(job, path)
