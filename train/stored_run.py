"""Stored runs: restoring one, evaluating it, sampling text."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lib import kconf
from lib.config import CompileOptions, Config, config_from_values
from lib.data.datasets.chat.spec import ChatSpec
from lib.data.datasets.files import DataCode
from lib.data.tokenizers import as_text
from lib.data.types import TextSpec
from lib.devices.backend import open_backend
from lib.devices.probe import probe
from lib.errors import CheckpointError, ConfigError, ToolkitError
from lib.nn.model_code import code_facts
from lib.plan import plan as decide
from lib.plan.types import Plan
from lib.plugin_folders import ROOT
from lib.plugins import DATASETS
from lib.runs import checkpoint
from lib.runs.directory import RunDir, resolve_run
from lib.runs.identity import DIRECTORIES, identity, trains
from lib.runs.index import facts_of, objects_of, stored
from lib.units import value_text
from train import loop
from train.build import make_job
from train.generate import Sampling, continued_text
from train.job import Job
from train.job import evaluate as evaluate_job
from train.record import Record, format_evaluation, log
from train.summary import baseline_of, eval_part
from train.tasks.base import preparation_of
from train.training_data import (
    TrainingData,
    cache_of,
    make_training_data,
    open_training_data,
)

_DIFFERENCES = 5  # number listed in a refusal
# Facts whose difference does not matter: free memory varies, and is relevant only if the plan differs.
_PASSING = {"free_bytes", "usable_bytes", "reasons"}


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A run restored from its checkpoint, in one process."""

    run: RunDir
    data: TrainingData
    job: Job
    step: int


def evaluate(name: str, *, root: Path, runs: Path, best: bool) -> int:
    """Evaluate the latest or the best checkpoint of run `name` by its configuration."""
    restored = restore(name, root=root, runs=runs, best=best)
    job = restored.job
    with job.train_loader, job.eval_loader:
        result = evaluate_job(job)
    dataset = restored.data.dataset
    part = eval_part(job.config, dataset)
    print(f"{restored.run.path}, step {restored.step}: {format_evaluation(result)} ({part})")
    baseline = baseline_of(job.config, dataset, cache_dir=cache_of(root), log=log)
    if baseline is not None:
        print(baseline)
    return 0


def sample(name: str, *, root: Path, runs: Path, best: bool, prompt: str, sampling: Sampling) -> int:
    """Print the run, and `prompt` with its continuation by the language model of run `name`."""
    as_text(prompt.encode(errors="surrogateescape"), Path("PROMPT="))  # refuses bytes that are no UTF-8
    restored = restore(name, root=root, runs=runs, best=best, needs_data=False)
    dataset = restored.data.dataset
    if isinstance(dataset.spec, ChatSpec):
        from train.tasks.chat.exhibits import answer

        found = answer(restored.job, dataset, prompt, sampling=sampling)
        print(f"{restored.run.path}, step {restored.step}:\n{found}")
        return 0
    if not isinstance(dataset.spec, TextSpec):
        raise ConfigError(f"{restored.run.path} is not a language model", todo="name one with RUN=")
    if dataset.tokenizer is None:
        raise ConfigError(
            f"what the tokens of {dataset.spec.name} stand for is not known", why="they came ready-made"
        )
    tokens = dataset.tokenizer.encode(prompt)
    if not tokens:
        raise ConfigError("the prompt is empty", todo="give some text as PROMPT=")
    with restored.job.train_loader, restored.job.eval_loader:
        found = continued_text(restored.job, dataset.tokenizer, tokens, sampling=sampling)
    print(f"{restored.run.path}, step {restored.step}:\n{found}")
    return 0


def stored_configuration(run: RunDir, root: Path) -> kconf.Resolved:
    """Return the requested configuration of `run`, resolved by the current Kconfig tree; report differences.

    Raises ConfigError if it is not the configuration that the run was made with.
    """
    try:
        resolved = kconf.load(root=root, config_file=run.config, refresh=True)
    except ConfigError as error:
        if not _restores(run, root):
            raise
        todo = f"restore it: {_restoring(run)}"
        raise ConfigError(error.what, todo=todo, findings=error.findings) from error
    if run.identity and not trains(run, resolved):
        _check_directories(run, resolved)
        restore = f"restore it: {_restoring(run)}; or " if _restores(run, root) else ""
        accepted = run.path.with_name(run.name.replace(run.identity, identity(resolved.in_effect)))
        accept = f"mv {shlex.quote(str(run.path))} {shlex.quote(str(accepted))}"
        if not (changed := _differences(run, resolved)):
            what, why = f"{run.path} is not called as its run was", "the folder was renamed or moved"
            raise ConfigError(what, why=why, todo=f"give it its name again: {accept}")
        raise ConfigError(
            f"{run.config} is not what the run was made with",
            why=changed,
            todo=f"{restore}accept it as it is: {accept}",
        )
    for notice in resolved.notices:
        log(notice)
    return resolved


def log_differences(run: RunDir, *, now: Mapping[str, Mapping[str, Any]], or_none: bool = False) -> None:
    """Log what differs between `run` and `now`, also `or_none`. Raises what `differences` does."""
    none = ["nothing: versions, machine, code and plan are the same"] if or_none else []
    for line in [*differences(run, now=now)] or none:
        log(f"Different from {run.name}: {line}")


def differences(run: RunDir, *, now: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each fact that differs between `run` and `now` (directory.OBJECTS -> content).

    Raises ToolkitError if `run` lacks such a file, but for "plugins", which older runs have not.
    """
    for name, content in now.items():
        known = run.read_json(name) if name != "plugins" else objects_of(run, name)[0][name] or content
        before, after = (dict(facts_of(each, skip=_PASSING)) for each in (known, content))
        for fact in {**before, **after}:
            if (old := before.get(fact)) != (new := after.get(fact)):
                yield f"{name}: {fact} {value_text(old, 'none')} -> {value_text(new, 'none')}"


def _restores(run: RunDir, root: Path) -> bool:
    """Return True if the minimal configuration resolves to what the run was made with."""
    try:
        return trains(run, kconf.load(root=root, config_file=run.minimal))
    except ConfigError:
        return False


def _restoring(run: RunDir) -> str:
    return f"cp {shlex.quote(str(run.minimal))} {shlex.quote(str(run.config))}"


def _check_directories(run: RunDir, resolved: kconf.Resolved) -> None:
    """Raise ConfigError where the configuration is that of the run, so that a directory has other files."""
    known, given = stored(run, "values", kconf.values_from_json), resolved.in_effect
    named = [name for name in DIRECTORIES if given.get(name)]
    if not named or any(known.get(name) != value for name, value in given.items()):
        return
    gone = [name for name in named if not (ROOT / Path(str(given[name])).expanduser()).is_dir()]
    listed = ", ".join(f"CONFIG_{name}={given[name]}" for name in gone or named)
    raise ConfigError(
        f"{run.path} needs the files that it was made with in {listed}",
        why="it is not there" if gone else "some were changed, added or removed",
        todo=f"put them back, or write where they are into {run.config}",
    )


def _differences(run: RunDir, resolved: kconf.Resolved) -> str:
    """Format the first values that differ from those the run stored; "" where none does."""
    known = stored(run, "values", kconf.values_from_json)
    found = [
        f"{name} {known[name]} -> {value}" if name in known else f"{name} {value} is new"
        for name, value in resolved.in_effect.items()
        if name not in known or known[name] != value
    ]
    if known.keys().isdisjoint(resolved.in_effect):
        return f"it was changed, and {run.path / 'values.json'} has no value of it"
    more = f" and {len(found) - _DIFFERENCES} more" if len(found) > _DIFFERENCES else ""
    return ", ".join(found[:_DIFFERENCES]) + more


def restore(
    name: str,
    *,
    root: Path,
    runs: Path,
    best: bool,
    needs_data: bool = True,
    check: Callable[[Config], object] = lambda _: None,
) -> Restored:
    """Restore run `name`, to evaluate it.

    needs_data: False takes what preprocess.json tells of the data, with a blank sample in their place; the
    data are opened all the same if the run has no such file, or its task prepares models by them. check: of
    the configuration, before anything is opened. Raises ToolkitError if the run has no such checkpoint.
    """
    run = resolve_run(runs, name)
    requested = config_from_values(stored_configuration(run, root).values)
    check(requested)
    code = code_facts(requested.model, requested.task, requested.dataset)
    log_differences(run, now={"plugins": code})
    hardware = probe(requested.device)
    trained = stored(run, "plan", Plan.from_json)
    config = for_one_process(requested, trained, devices=len(hardware.devices))
    state = _load(run, best=best)
    data = None if needs_data else _without_data(run, config)
    data = data or open_training_data(config, root=root, log=log)
    plan = decide(config, hardware, dataclasses.replace(data.facts, train_size=None))
    backend = open_backend(plan.device, world=1, devices=plan.layout.devices_per_process)
    weights = None
    if config.weights.adapt != "full":  # a checkpoint has what is trained
        from train.initial_weights import initial_weights

        weights = initial_weights(config, root)
    record = Record()
    job = make_job(config, plan, data, hardware=hardware, backend=backend, record=record, weights=weights)
    return Restored(run, data, job, loop.load_state_dict(job, state, to_train=False).step)


def _load(run: RunDir, *, best: bool) -> dict[str, Any]:
    """Return the state of a checkpoint. Raises ToolkitError that says what can be done without it."""
    todo = "name another run by RUN= (make runs lists them)"
    damaged = f"train again, or {todo}"
    try:
        found = checkpoint.load(run.checkpoints, which="best" if best else "latest", log=log, todo=damaged)
    except CheckpointError as error:
        valid = checkpoint.latest_valid(run.checkpoints) if best and error.todo == damaged else None
        if valid is None:
            raise
        todo = f"leave out BEST=1: the latest valid one is of step {valid}"
        raise CheckpointError(error.what, why=error.why, todo=todo) from error
    if found is None:
        if best and run.checkpoint_steps:
            todo = f"leave out BEST=1: the latest is of step {max(run.checkpoint_steps)}"
        raise ToolkitError(f"{run.path} has no {'best ' if best else ''}checkpoint", todo=todo)
    return found[1]


def _without_data(run: RunDir, config: Config) -> TrainingData | None:
    """Return what `run` stored of its data, None if that is not enough."""
    from lib.data.inputs import stored_dataset  # its readers are for inputs of other commands

    if preparation_of(config) is not None:
        return None
    if not objects_of(run, "preprocess")[0]["preprocess"]:
        log(f"{run.path} does not say how its data are read (preprocess.json): they are opened")
        return None
    with DataCode(config.dataset):
        names = vars(DATASETS.load(config.dataset))
    dataset = stored(run, "preprocess", partial(stored_dataset, plugin=names))
    return None if dataset is None else make_training_data(config, dataset)


def for_one_process(config: Config, trained: Plan, *, devices: int) -> Config:
    """Adapt `config` to evaluate in one process, on `devices` devices, what was trained by `trained`.

    There is no batch to plan and there are no training data to hold. Evaluation counts every sample once,
    whatever the batch size. It is not compiled, which would take longer than it.
    """
    # Two frozen models on a device each may be too large for one device.
    apart = trained.layout.replica.strategy != "single"
    splits = trained.strategy == "split" and devices > 1
    in_turn = apart and trained.precision != "fp16"
    return config.replace(
        num_devices=2 if splits else 1,
        dist_strategy="split" if splits else "sequential" if in_turn else "auto",
        hyper_param="manual",
        batch_size=trained.micro_batch,
        gradient_accumulation=1,
        target_effective_batch=0,
        norm_batch=0,
        data_placement="stream",
        compilation=CompileOptions(
            compile="manual", compile_model=False, compile_blocks=False, cuda_graphs=False
        ),
    )
