"""Plan of a run: a new one, or the stored plan of the run that is resumed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.host import allocator_text
from lib.devices.probe import probe
from lib.errors import ConfigError
from lib.hyperparams import apply_hyperparams
from lib.plan.fitting import MemoryEstimator
from lib.plan.placement import place, refuse_static_shapes
from lib.plan.show import show
from lib.plan.types import Hardware, Plan
from lib.runs.directory import RunDir
from train.build import check_run
from train.job import warm_up_text
from train.planning.memory_estimate import MemoryTraces
from train.record import log
from train.training_data import TrainingData, open_to_train


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A requested run: configuration and origin."""

    resolved: kconf.Resolved
    config: Config
    root: Path  # the source tree
    runs: Path
    started: float  # time.monotonic() when the program began
    verbose: bool = False  # show the whole plan


def plan_for(request: RunRequest, data: TrainingData, hardware: Hardware, run: RunDir | None) -> Plan:
    """Return the plan for these devices: that of `run`, which is resumed, if it is for the same ones.

    Several nodes plan again whenever one joins or leaves. Raises PlanError if nothing fits, or if `run` would
    resume with another effective batch.
    """
    if run is None:
        plan = _decided(request, data, hardware)
    else:
        from train.resume import check_effective_batch, stored_plan  # most runs are new

        kept = None if hardware.of_all_nodes else stored_plan(run, request.config, hardware)
        plan = kept or _decided(request, data, hardware)
        check_effective_batch(run, plan, of_many=hardware.of_all_nodes)
    check_run(request.config, plan, data)
    show(plan, sys.stdout, compact=not request.verbose)
    if plan.device == "cuda":
        log(allocator_text())
    return plan


def _decided(request: RunRequest, data: TrainingData, hardware: Hardware) -> Plan:
    config, predict = request.config, MemoryTraces(request.config, data).predictor(hardware)
    probed = None
    if config.auto_method == "probe":
        from train.planning.autotune import ProbeTarget, cached_or_measured

        probed = cached_or_measured(
            ProbeTarget.of(request.resolved, data, hardware, root=request.root, predict=predict)
        )
    return apply_hyperparams(
        config, request.verbose, hardware=hardware, facts=data.facts, predict=predict, probed=probed
    )


def predicted_plan(config: Config, data: TrainingData, hardware: Hardware) -> tuple[Plan, MemoryEstimator]:
    """Return a plan by prediction and its predictor; also where probing is configured, which would train."""
    if config.auto_method == "probe":
        config = config.replace(auto_method="predict")
    predict = MemoryTraces(config, data).predictor(hardware)
    return apply_hyperparams(config, False, hardware=hardware, facts=data.facts, predict=predict), predict


def refuse(config: Config, data: TrainingData | None) -> None:
    """Raise what the plan of one node refuses by the metadata of `data`, or (None) by the options alone."""
    if config.dist_nnodes != "1" or config.launch.dist_endpoint:
        return  # check_node
    hardware = probe(config.device)
    if data is not None:
        check_run(config, predicted_plan(config, data, hardware)[0], data)
    elif config.elastic_policy != "latentwire" and place(config, hardware).world.value == 1:
        # Of timm and transformers only the model itself tells if it has batch normalisation.
        requested = config.replace(norm_batch=None)
        if config.auto_method == "probe":
            requested = requested.replace(auto_method="predict")
        plan = apply_hyperparams(requested, False, hardware=hardware, predict=lambda _: {})  # whatever fits
        if config.budget != "epochs":
            warm_up_text(config, train_size=1, effective_batch=plan.effective_batch)


def probe_command(requested: kconf.Resolved, *, root: Path) -> int:
    """Run `make probe`: measure, store the results, and print the resulting plan.

    Raises ConfigError if the batch is set by hand, PlanError if no micro-batch that was probed fits.
    """
    from lib.tiers import with_tier
    from train.planning.autotune import ProbeTarget, measure

    resolved = with_tier(requested, root=root, log=log)
    config = config_from_values(resolved.values)
    if config.hyper_param == "manual":
        raise ConfigError(
            "there is nothing to measure",
            why="CONFIG_HYPER_PARAM_MANUAL=y gives the micro-batch",
            todo="set CONFIG_HYPER_PARAM_AUTO=y",
        )
    hardware = probe(config.device)
    refuse_static_shapes(hardware.kind, what="measuring (make probe)")
    data = open_to_train(config, root=root, log=log, refuse=refuse)
    target = ProbeTarget.of(resolved, data, hardware, root=root)
    show(target.plan(measure(target)), sys.stdout)
    if config.auto_method != "probe":
        log("CONFIG_AUTO_METHOD_PROBE=y makes runs go by it")
    return 0
