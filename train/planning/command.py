"""`make plan`: the plan for this machine or a named one, and its basis."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.probe import probe
from lib.distributed.rendezvous import gathering_of
from lib.errors import PlanError
from lib.hyperparams import apply_hyperparams
from lib.memory.measured import Kept
from lib.nn.activation_checkpointing import CHOICES
from lib.plan.assumed import machine_names, parse_gpu
from lib.plan.fitting import GAPS, Parts, Trial, predicted, trial_of
from lib.plan.gpus import Gpu, find_gpu
from lib.plan.numerics import precision_problem
from lib.plan.placement import place
from lib.plan.planner import ways_to_spread
from lib.plan.reasons import told
from lib.plan.roofline import StepTime, StepWork, estimate_step_time
from lib.plan.show import show
from lib.plan.types import OWN_MEMORY, Hardware, Memory, Plan
from lib.plan.ways import WayToSpread, ways_text
from lib.tiers import with_tier
from lib.units import bytes_text
from train.budget import warm_up_text
from train.initial_weights import check_file
from train.planning.autotune import Bench, known
from train.planning.memory_estimate import Footprint, Footprints
from train.stored_run import say
from train.training_data import Subject, unopened_subject

BAR_COLUMNS = 40
UNBOUNDED = 10**6  # columns if the output is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A plan and its consequences, before anything is run."""

    plan: Plan
    steps_per_epoch: float
    warm_up: str  # formatted; "" for none
    step_flop: int  # per device
    step_time: StepTime | None  # None if the device is not in the catalogue
    gpu_origin: str | None  # source of the catalogue's figures
    alternatives: tuple[str, ...]
    ways: tuple[WayToSpread, ...]  # empty for one device
    asked_method: str  # manual, or the value of CONFIG_AUTO_METHOD
    measured: str | None  # when the micro-batch was measured here; None if it was not

    @property
    def method(self) -> str:
        """The method that chose the micro-batch."""
        if self.measured is not None:
            return "measured"
        return self.asked_method if self.asked_method in ("table", "manual") else "predicted"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `make plan` prints."""
        return {
            "plan": self.plan.to_json(),
            "steps_per_epoch": self.steps_per_epoch,
            "step_flop": self.step_flop,
            "step_seconds_estimate": None
            if self.step_time is None
            else [self.step_time.fastest_seconds, self.step_time.slowest_seconds],
            "gpu_figures_from": self.gpu_origin,
            "alternatives": list(self.alternatives),
            "ways_to_spread": [way.to_json() for way in self.ways],
            "method": self.method,
            "measured": self.measured,
        }


def plan(asked: kconf.Resolved, *, root: Path, gpu: str, as_json: bool) -> int:
    """Print the plan and its reasons, for this machine or for those that `gpu` names.

    Raises PlanError if nothing fits, with remedies; ConfigError for a warmup that does not end, a wrong
    endpoint, or initial weights that this machine cannot read.
    """
    names = machine_names(gpu) if gpu else ()
    tell = _say_nothing if as_json else say
    resolved = _at_tier(asked, names, root=root, tell=tell)
    config = config_from_values(resolved.values)
    gathering_of(nodes=config.dist_nnodes, endpoint=config.dist_endpoint)
    if not names:  # a named machine may have files that this one lacks
        check_file(config, root)
    subject = unopened_subject(config, root=root, say=tell)
    if len(names) > 1:
        return _compare(config, subject, names, as_json=as_json)
    hardware = parse_gpu(names[0]) if names else probe(config.device)
    footprints, kept = Footprints(config, subject), None
    if config.auto_method == "probe" and not names:
        predict = footprints.predictor(hardware)
        kept = known(Bench.of(resolved, subject, hardware, root=root, predict=predict))
    outlook = look_ahead(config, subject, hardware, footprints, kept=kept)
    if as_json:
        print(json.dumps(outlook.to_json(), indent=2))
        return 0
    show(outlook.plan, sys.stdout)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED
    for line in [*_lines(outlook, columns=columns), *resolved.asked()]:
        print(textwrap.fill(line, columns, subsequent_indent="  "))
    return 0


def _at_tier(
    resolved: kconf.Resolved, names: tuple[str, ...], *, root: Path, tell: Callable[[str], None]
) -> kconf.Resolved:
    """Set the compute tier of the named machine, or of this one."""
    if len(names) > 1 and config_from_values(resolved.values).tier == "auto":
        raise PlanError(
            "CONFIG_TIER_AUTO=y means another configuration on each machine",
            todo="set a tier (CONFIG_TIER_2=y) to compare machines",
        )
    hardware = parse_gpu(names[0]) if names else None
    return with_tier(resolved, root=root, say=tell, hardware=hardware)


def look_ahead(
    config: Config,
    subject: Subject,
    hardware: Hardware,
    footprints: Footprints,
    *,
    kept: Kept | None = None,
    ways_out: bool = True,
) -> Outlook:
    """Return the plan of `config` on `hardware`, and its consequences.

    kept: a measurement made there. ways_out: also try changes that need less memory, which doubles the time.
    """
    predict, probed = footprints.predictor(hardware), kept.probed if kept is not None else None
    decided = apply_hyperparams(
        config, False, hardware=hardware, facts=subject.facts, predict=predict, probed=probed
    )
    found = footprints.of(trial_of(decided), hardware)
    micro_batches = 2 if decided.accumulation > 1 else 1
    step_flop = found.step_flop * decided.accumulation // micro_batches
    gpu = find_gpu(hardware.devices[0].name) if hardware.kind != "cpu" else None
    return Outlook(
        plan=decided,
        steps_per_epoch=subject.dataset.train.size / decided.effective_batch,
        warm_up=warm_up_text(
            config, train_size=subject.dataset.train.size, effective_batch=decided.effective_batch
        ),
        step_flop=step_flop,
        step_time=None if gpu is None else _step_time(decided, found, gpu, step_flop=step_flop),
        gpu_origin=None if gpu is None else gpu.origin,
        alternatives=tuple(_alternatives(config, subject, hardware, decided)) if ways_out else (),
        ways=tuple(
            WayToSpread.of(candidate, verdict)
            for candidate, verdict in ways_to_spread(
                config, hardware, subject.facts, predict=predict, probed=probed
            )
            if decided.layout.devices > 1
        ),
        asked_method=config.auto_method or "manual",
        measured=kept.made if kept is not None else None,
    )


def _step_time(decided: Plan, found: Footprint, gpu: Gpu, *, step_flop: int) -> StepTime:
    parts = found.trace.at_peak()
    work = StepWork(
        flop=step_flop,
        accumulation=decided.accumulation,
        weight_bytes=parts.get("parameters", 0),
        gradient_bytes=parts.get("parameters", 0),
        optimizer_bytes=parts.get("optimizer", 0),
        activation_bytes=parts.get("activations", 0) * decided.accumulation,
        frozen_bytes=parts.get("frozen models", 0),
    )
    return estimate_step_time(work, gpu, precision=decided.precision)


def _alternatives(config: Config, subject: Subject, hardware: Hardware, decided: Plan) -> Iterator[str]:
    """Yield the peak after each single change of the configuration, at the same micro-batch."""
    if decided.memory is None:
        return
    trial, now = trial_of(decided), decided.memory.peak_bytes
    for change, changed, other in _changes(config, trial, hardware):
        peak = predicted(other, Footprints(changed, subject).predictor(hardware), free_bytes=0).peak_bytes
        if peak < 0.98 * now:
            yield f"{change}: {bytes_text(peak)} of tensors at the peak instead of {bytes_text(now)}"


def _changes(config: Config, trial: Trial, hardware: Hardware) -> Iterator[tuple[str, Config, Trial]]:
    if config.grad_checkpoint is not None:
        for recompute in CHOICES[CHOICES.index(config.grad_checkpoint) + 1 :]:
            name = f"CONFIG_GRAD_CHECKPOINT_{recompute.upper()}=y"
            yield name, dataclasses.replace(config, grad_checkpoint=recompute), trial
    if config.block_size is not None and not config.chunked_cross_entropy:
        changed = dataclasses.replace(config, chunked_cross_entropy=True)
        yield "CONFIG_CHUNKED_CROSS_ENTROPY=y", changed, trial
    bf16_helps = trial.precision == "fp32" and trial.device != "cpu"
    if bf16_helps and not precision_problem("bf16", place(config, hardware)):
        yield "CONFIG_PRECISION_BF16=y", config, dataclasses.replace(trial, precision="bf16")
    if trial.device in OWN_MEMORY and not config.activation_offload:
        changed = dataclasses.replace(config, activation_offload=True)
        yield "CONFIG_ACTIVATION_OFFLOAD=y (slow: all of it crosses the bus twice)", changed, trial
    if config.optimizer != "sgd":
        changed = dataclasses.replace(config, optimizer="sgd", momentum=0.9, nesterov=False)
        yield "CONFIG_OPTIMIZER_SGD=y (not the same mathematics)", changed, trial
    if config.ema:
        yield "CONFIG_EMA=n (not the same mathematics)", dataclasses.replace(config, ema=False), trial


def _lines(outlook: Outlook, *, columns: int) -> Iterator[str]:
    decided = outlook.plan
    if decided.memory is not None:
        yield ""
        yield from _bars(decided.memory, columns=columns)
    yield ""
    yield f"{outlook.steps_per_epoch:.1f} optimizer steps an epoch"
    if outlook.warm_up:
        yield outlook.warm_up
    yield f"{outlook.step_flop / 1e12:.4g} TFLOP a step on each device (products, convolutions, attention)"
    if outlook.step_time is not None:
        yield str(outlook.step_time)
    if outlook.ways:
        yield from ways_text(outlook.ways, columns=shutil.get_terminal_size().columns)
    yield _methods(outlook)
    if outlook.alternatives:
        yield "What would need less memory:"
        yield from (f"  {line}" for line in outlook.alternatives)


def _methods(outlook: Outlook) -> str:
    """Format the source of each number."""
    origin = {
        "measured": f"measured here on {outlook.measured} (make probe)",
        "predicted": "predicted",
        "table": "from the table of free memory",
        "manual": "set by hand",
    }[outlook.method]
    if outlook.gpu_origin is None:
        return f"Micro-batch: {origin}; memory and work: predicted"
    figures = f"figures of the GPU: {outlook.gpu_origin}"
    return f"Micro-batch: {origin}; memory and work: predicted; seconds: estimated; {figures}"


def _bars(memory: Memory, *, columns: int) -> Iterator[str]:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    gaps: Parts = {GAPS: memory.gaps_bytes} if memory.gaps_bytes else {}
    rows: Parts = {**dict(parts), **gaps, "reserve": memory.reserve_bytes}
    free = memory.usable_bytes - memory.need_bytes
    rows = {**rows, "left": max(0, free)}
    widest = max(map(len, rows))
    longest = max(1, min(BAR_COLUMNS, columns - widest - len("  1234.56 GB  ")))
    for name, byte_count in rows.items():
        bar = "#" * round(longest * byte_count / max(1, memory.usable_bytes, memory.need_bytes))
        yield f"{name:<{widest}}  {bytes_text(byte_count):>10}  {bar}".rstrip()


def _compare(config: Config, subject: Subject, names: tuple[str, ...], *, as_json: bool) -> int:
    """Print one line per machine of the catalogue."""
    footprints = Footprints(config, subject)
    outlooks: dict[str, Outlook | PlanError] = {}
    for name in names:
        try:
            outlooks[name] = look_ahead(config, subject, parse_gpu(name), footprints, ways_out=False)
        except PlanError as error:
            outlooks[name] = error
    errors = {str(found) for found in outlooks.values() if isinstance(found, PlanError)}
    if len(errors) == 1 and all(isinstance(found, PlanError) for found in outlooks.values()):
        raise PlanError(f"on none of {len(outlooks)} machines: {errors.pop()}")  # no machine's fault
    status = 2 if all(isinstance(found, PlanError) for found in outlooks.values()) else 0
    if as_json:
        everything = {
            name: {"error": str(found)} if isinstance(found, PlanError) else found.to_json()
            for name, found in outlooks.items()
        }
        print(json.dumps(everything, indent=2))
        return status
    widest = max(map(len, names))
    for name, found in outlooks.items():
        print(f"{name:<{widest}}  {_summary(found)}")
    return status


def _summary(found: Outlook | PlanError) -> str:
    if isinstance(found, PlanError):
        return str(found)
    decided, memory = found.plan, found.plan.memory
    sizes = f"{decided.micro_batch:>5} x {decided.accumulation:<4} {decided.precision}"
    compiled = "compiled" if decided.compile else "eager   "
    need = "" if memory is None else f"{told(memory):>29}{'' if memory.fits else ', MORE than there is'}"
    time = found.step_time
    seconds = "" if time is None else f"  {time.span} (estimate)"
    return f"{sizes}  {compiled}  {need}{seconds}"


def _say_nothing(_: str) -> None:
    pass
