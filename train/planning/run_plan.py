"""What was asked of a run, and the plan for it: a new one, or that of the run that is gone on with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from lib import kconf
from lib.config import Config
from lib.errors import PlanError
from lib.hyperparams import apply_hyperparams
from lib.plan.fitting import MemoryEstimator
from lib.plan.placement import place
from lib.plan.probing import Probed
from lib.plan.show import show
from lib.plan.types import Hardware, Plan
from lib.runs.directory import RunDir
from train.budget import warm_up_text
from train.build import epochs_ahead
from train.contract import check_channels_last
from train.planning.autotune import Bench, known_or_measured
from train.planning.memory_estimate import Footprints
from train.stored_run import say, stored
from train.training_data import Subject, built


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was asked, and where from."""

    resolved: kconf.Resolved
    config: Config
    root: Path  # the source tree
    runs: Path
    started: float  # time.monotonic() when the program began


def plan_for(
    order: Order, subject: Subject, hardware: Hardware, run: RunDir | None, *, of_many: bool = False
) -> Plan:
    """The plan for these devices: that of `run`, which is gone on with, if it is for the same ones.

    of_many: several machines have met, and decide again whenever one comes or goes. Raises PlanError where
    nothing fits, and where `run` would go on with another effective batch.
    """
    plan = None if run is None or of_many else _kept(run, order, hardware)
    if plan is None:
        plan = _decided(order, subject, hardware)
        if run is not None:
            _check_effective_batch(run, plan, of_many=of_many)
    check_run(order.config, plan, subject)
    show(plan, sys.stdout)
    return plan


def check_run(config: Config, plan: Plan, subject: Subject) -> None:
    """Raise ConfigError, before there is a run directory, for what the plan leaves to training to find."""
    warm_up_text(config, train_size=subject.dataset.train.size, effective_batch=plan.effective_batch)
    epochs_ahead(config, plan, subject.dataset.train, say=lambda _: None)
    if plan.channels_last and plan.device == "cpu":
        with torch.device("meta"):
            check_channels_last(built(config, subject.dataset.spec))


def _kept(run: RunDir, order: Order, hardware: Hardware) -> Plan | None:
    """The plan of `run`, if it is for this machine and as many of its devices as are asked for now."""
    if not _same_machine(stored(run, "hardware", Hardware.from_json), hardware):
        return None
    plan = stored(run, "plan", Plan.from_json)
    if plan.layout.devices != place(order.config, hardware).world.value:
        return None
    # Another cut into micro-batches would be the same mathematics, but not the same bits.
    say(f"Plan of {run.path}, for it was made for this machine")
    return plan


def _decided(order: Order, subject: Subject, hardware: Hardware) -> Plan:
    predict = Footprints(order.config, subject).predictor(hardware)
    return apply_hyperparams(
        order.config,
        hardware=hardware,
        facts=subject.facts,
        predict=predict,
        probed=_probed(order, subject, hardware, predict),
    )


def _check_effective_batch(run: RunDir, plan: Plan, *, of_many: bool) -> None:
    before = stored(run, "plan", Plan.from_json)
    if before.effective_batch == plan.effective_batch:
        return
    # Several machines go on from a checkpoint whenever one comes or goes.
    anew = "without that directory" if of_many else "with make train CONFIG_RESUME_NEVER=y"
    raise PlanError(
        f"{run.path} was trained with {before.effective_batch} samples a step, and now it would be "
        f"{plan.effective_batch}",
        why=plan.reasons["effective_batch"],
        todo=f"go on with {before.layout.devices} device(s), or start anew {anew}",
    )


def _same_machine(one: Hardware, other: Hardware) -> bool:
    """Whether they differ in nothing but how much memory is free."""
    return (one.kind, one.cpu_name, [device.name for device in one.devices]) == (
        other.kind,
        other.cpu_name,
        [device.name for device in other.devices],
    )


def _probed(order: Order, subject: Subject, hardware: Hardware, predict: MemoryEstimator) -> Probed | None:
    """What was measured, if that is how the micro-batch is to be found."""
    if order.config.auto_method != "probe":
        return None
    return known_or_measured(Bench.of(order.resolved, subject, hardware, root=order.root, predict=predict))
