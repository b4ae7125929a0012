"""`make plan`: the plan for this machine or a named one, and its basis."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import kconf
from lib.config import Config, config_from_values
from lib.devices.host import allocator_setting, allocator_text
from lib.devices.probe import probe
from lib.distributed.rendezvous import rendezvous_of
from lib.errors import PlanError
from lib.hyperparams import apply_hyperparams
from lib.plan.cost import LIST, NOT_COUNTED, Cost, cost_of, format_cost, format_training, money_text, price_of
from lib.plan.fitting import NoRoomError, step_settings
from lib.plan.gpus import machine_names, parse_gpu
from lib.plan.placement import STEP_COMPILER, by_requested_backend, of_all_nodes, place
from lib.plan.planner import compare_strategies
from lib.plan.roofline import LAUNCH_SECONDS, StepTime
from lib.plan.sharding import Links
from lib.plan.show import WARNS, format_need, named_decisions, show
from lib.plan.sizing import Candidate
from lib.plan.strategy_table import format_strategies
from lib.plan.types import STATIC_SHAPES, Hardware, Memory, Plan
from lib.tiers import with_tier
from lib.units import aligned, columns, flop_text, range_text, some_of
from train.adapters import without_files
from train.base_run import base_of, check_base
from train.initial_weights import initial_weights
from train.job import budget_of, warm_up_text
from train.padding import format_padding
from train.planning.autotune import CachedProbe, ProbeTarget, cached
from train.planning.changes import (
    Change,
    attempts,
    data_for,
    further_changes,
    most_recomputed,
    smaller_peaks,
)
from train.planning.memory_estimate import MemoryTraces
from train.planning.step_estimate import gpu_of_hardware, links_of, step_flop_of, step_time_of
from train.planning.traced_steps import Launches
from train.record import log
from train.training_data import TrainingData, check_start, describe_training_data

UNBOUNDED = 10**6  # columns if the output is no terminal
UNMEASURED = (
    f"memory counts tensors of eager execution: what {STEP_COMPILER} fuses, pads and keeps was not measured, "
    "and a fifth of the memory is left free for it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A plan and its consequences, before anything is run."""

    plan: Plan
    steps_per_epoch: float
    warm_up: str  # formatted; "" for none
    step_flop: int  # per device
    launches: Launches
    step_time: StepTime | None  # None if the device is not in the catalogue
    cost: Cost
    gpu_origin: str | None  # source of the catalogue's figures
    links: Links | None  # that the estimates assume
    alternatives: tuple[str, ...]
    strategies: tuple[Candidate, ...]  # empty for one device
    method: str  # that chose the micro-batch: manual, table, predicted or measured
    measured: str | None  # when the micro-batch was measured here; None if it was not

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `make plan` prints."""
        time = self.step_time
        return {
            "plan": self.plan.to_json(),
            "steps_per_epoch": self.steps_per_epoch,
            "step_flop": self.step_flop,
            "step_seconds_estimate": time and [time.fastest_seconds, time.slowest_seconds],
            "step_bound": time and time.bound,
            "kernel_launches": self.launches._asdict(),
            "launch_seconds_assumed": LAUNCH_SECONDS[self.plan.compile],
            "cost": dataclasses.asdict(self.cost),
            "allocator": allocator_setting() if self.plan.device == "cuda" else None,
            "gpu_figures_from": self.gpu_origin,
            "links_assumed": self.links and dataclasses.asdict(self.links),
            "alternatives": list(self.alternatives),
            "ways_to_spread": [each.to_json() for each in self.strategies],
            "method": self.method,
            "measured": self.measured,
        }


def plan(requested: kconf.Resolved, *, root: Path, gpu: str, as_json: bool, price: str = "") -> int:
    """Print the plan and its reasons, for this machine or for those that `gpu` names.

    price: of a device and hour, "list" for list prices, "" for none.

    Raises PlanError if nothing fits, with remedies; ConfigError for a wrong price, a warmup that does not
    end, a wrong endpoint, or initial weights that this machine cannot read.
    """
    price_of(price, None)  # before what takes long
    names = machine_names(gpu) if gpu else ()
    report = (lambda _: None) if as_json else log
    resolved = _at_tier(requested, names, root=root, log=report)
    config = config_from_values(resolved.values)
    if not names:  # a job finds the endpoint of named machines, which may have files that this one lacks
        rendezvous_of(nodes=config.dist_nnodes, endpoint=config.launch.dist_endpoint)
        if has_weights := (base := base_of(config, root)) is None or base.folder.exists():
            initial_weights(config, root)
    data = describe_training_data(config, root=root, log=report)
    if not names and has_weights:
        check_start(config, data.dataset, root, log=report)
    elif not names and base is not None:
        describe = functools.partial(describe_training_data, root=root)
        check_base(base, config, data.dataset.spec, describe=describe)
        report(f"Initial weights: {config.weights.initial_weights}, which make train trains first")
    if note := without_files(config):
        report(note)
    if len(names) > 1:
        return _compare(config, data, names, as_json=as_json, price=price)
    hardware = parse_gpu(names[0]) if names else probe(config.device)
    memory_traces, measured = MemoryTraces(config, data), None
    if config.auto_method == "probe" and not names:
        predict = memory_traces.predictor(hardware)
        measured = cached(ProbeTarget.of(resolved, data, hardware, root=root, predict=predict))
    try:
        outlook = look_ahead(config, data, hardware, memory_traces, measured=measured, price=price)
    except NoRoomError as error:
        fits = False
        if not as_json:
            print(
                "Nothing fits. With each of these changes (samples at a time x micro-batches):",
                flush=True,
            )
            for line in what_would_fit(config, data, hardware, error, root=root):
                print(f"  {line}", flush=True)
                fits = fits or not line.startswith("not ")
        if fits:
            raise PlanError(error.what, why=error.why, todo="make one of the changes above") from error
        raise
    if as_json:
        print(json.dumps(outlook.to_json(), indent=2))
        return 0
    print(*resolved.requested(), "", sep="\n")
    show(outlook.plan, sys.stdout)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUNDED
    padding = [line] if (line := format_padding(data.dataset, outlook.plan, seed=config.seed)) else []
    for line in [*_lines(outlook), *padding, "", *format_cost(outlook.cost, price)]:
        print(textwrap.fill(line, width, subsequent_indent="  "))
    return 0


def _at_tier(
    resolved: kconf.Resolved, names: tuple[str, ...], *, root: Path, log: Callable[[str], None]
) -> kconf.Resolved:
    """Set the compute tier of the named machine, or of this one."""
    if len(names) > 1 and config_from_values(resolved.values).tier == "auto":
        raise PlanError(
            "CONFIG_TIER_AUTO=y means another configuration on each machine",
            todo="set a tier (CONFIG_TIER_2=y) to compare machines",
        )
    return with_tier(resolved, root=root, log=log, hardware=parse_gpu(names[0]) if names else None)


def look_ahead(
    config: Config,
    data: TrainingData,
    hardware: Hardware,
    memory_traces: MemoryTraces,
    *,
    measured: CachedProbe | None = None,
    alternatives: bool = True,
    price: str = "",
) -> Outlook:
    """Return the plan of `config` on `hardware`, and its consequences.

    measured: a measurement made there. alternatives: where memory is short also try changes that need less,
    which doubles the time. price: value of PRICE=.
    """
    hardware = by_requested_backend(hardware, device=config.device)
    config, hardware = _on_all_nodes(config, hardware)
    predict, probed = memory_traces.predictor(hardware), measured.probed if measured is not None else None
    options: dict[str, Any] = {"predict": predict, "probed": probed}
    decided = apply_hyperparams(config, False, hardware=hardware, facts=data.facts, **options)
    methods = {None: "manual", "table": "table"}
    size, several = data.dataset.train.size, decided.strategy != "single"
    found, gpu = memory_traces.of(step_settings(decided), hardware), gpu_of_hardware(hardware)
    step_time = step_time_of(decided, found, data, config, hardware)
    step_flop = step_flop_of(decided, found, data.facts)
    outlook = Outlook(
        plan=decided,
        steps_per_epoch=size / decided.effective_batch,
        warm_up=warm_up_text(config, train_size=size, effective_batch=decided.effective_batch),
        step_flop=step_flop,
        launches=found.launches,
        step_time=step_time,
        cost=cost_of(
            decided,
            step_time,
            **dataclasses.asdict(budget_of(config, train_size=size, effective_batch=decided.effective_batch)),
            train_size=size,
            step_flop=step_flop,
            device=hardware.devices[0].name,
            gpu=gpu,
            price=price,
        ),
        gpu_origin=None if gpu is None else gpu.origin,
        links=links_of(config, hardware),
        alternatives=(),
        strategies=compare_strategies(config, hardware, data.facts, **options) if several else (),
        method="measured" if measured is not None else methods.get(config.auto_method, "predicted"),
        measured=measured.made if measured is not None else None,
    )
    if not (alternatives and is_short_of_memory(outlook)):
        return outlook
    smaller = smaller_peaks(memory_traces, config, data, hardware, decided)
    return dataclasses.replace(outlook, alternatives=tuple(smaller))


def _on_all_nodes(config: Config, hardware: Hardware) -> tuple[Config, Hardware]:
    """Return both as `train.multi_node` has them after the rendezvous of the least number of nodes."""
    endpoint = config.launch.dist_endpoint
    rendezvous = rendezvous_of(nodes=config.dist_nnodes, endpoint=endpoint, default="any:1")
    if rendezvous is None:
        return config, hardware
    each = place(config, hardware).world.value
    joined = of_all_nodes(hardware, processes=each, world=each * rendezvous.min_nodes)
    return config.replace(num_devices=each * rendezvous.min_nodes), joined


def what_would_fit(
    config: Config, data: TrainingData, hardware: Hardware, error: NoRoomError, *, root: Path
) -> Iterator[str]:
    """Yield the plan after each change with which the run fits `hardware`, then those that do not suffice.

    error: of the run without changes. A change is not traced where what it keeps is too much already.
    """
    options: Any = {"precision": error.step.precision, "recompute": most_recomputed(config, data)}
    traces: tuple[Config, TrainingData, MemoryTraces] | None = None  # more devices share them

    def attempt(change: Change[Config]) -> tuple[Memory, str]:
        nonlocal traces
        changed = change.subject
        if traces is None or traces[0] != changed:
            own = data_for(changed, data, config, root=root)
            traces = changed, own, MemoryTraces(changed, own)
        machine = dataclasses.replace(hardware, devices=hardware.devices * change.devices)
        try:
            found = look_ahead(changed, traces[1], machine, traces[2], alternatives=False)
        except NoRoomError as too_much:
            return too_much.memory, ""
        assert found.plan.memory is not None, "what does not fit was predicted"
        time = "" if found.step_time is None else f", {found.step_time.span} a step"
        size = f"{found.plan.micro_batch} x {found.plan.accumulation}"
        return found.plan.memory, f": {size}, {format_need(found.plan.memory)}{time}"

    for name, found in attempts(further_changes(config, hardware, **options), error.memory, attempt):
        yield name + (found or "")


def _lines(outlook: Outlook) -> Iterator[str]:
    yield ""
    yield f"{f'{outlook.steps_per_epoch:,.1f}'.removesuffix('.0')} optimizer steps an epoch"
    if outlook.warm_up:
        yield outlook.warm_up
    work = f"{flop_text(outlook.step_flop)} of matrix products, convolutions and attention"
    yield f"Work of a step on each device: {work}"
    if outlook.step_time is not None:
        yield str(outlook.step_time)
    if outlook.strategies:
        yield from format_strategies(outlook.strategies, columns=shutil.get_terminal_size().columns)
    if outlook.plan.device == "cuda":
        yield allocator_text()
    yield _methods(outlook)
    if outlook.alternatives:
        yield "Changes that need less memory:"
        yield from (f"  {line}" for line in outlook.alternatives)


def is_short_of_memory(outlook: Outlook) -> bool:
    """True if more than half is used, or if it limits the micro-batch: on CPUs a larger one is no faster."""
    decided, memory = outlook.plan, outlook.plan.memory
    limited = outlook.method != "manual" and decided.accumulation > 1 and decided.device != "cpu"
    return memory is not None and (limited or 2 * memory.need_bytes > memory.usable_bytes)


def _methods(outlook: Outlook) -> str:
    """Format the source of each number."""
    origin = {
        "measured": f"measured here on {outlook.measured} (make probe)",
        "predicted": "predicted",
        "table": "from the table of free memory",
        "manual": "set by hand",
    }[outlook.method]
    if outlook.gpu_origin is None:
        return f"Basis: micro-batch {origin}; memory and work predicted"
    figures = f"figures of the device: {outlook.gpu_origin}"
    if outlook.plan.device in STATIC_SHAPES:
        figures += f"; {UNMEASURED}"
    return f"Basis: micro-batch {origin}; memory and work predicted; times estimated; {figures}"


def _compare(
    config: Config, data: TrainingData, names: tuple[str, ...], *, as_json: bool, price: str = ""
) -> int:
    """Print a table of the machines of the catalogue, the cheapest or fastest first."""
    memory_traces = MemoryTraces(config, data)
    outlooks: dict[str, Outlook | PlanError] = {}
    for name in names:
        try:
            outlooks[name] = look_ahead(
                config, data, parse_gpu(name), memory_traces, alternatives=False, price=price
            )
        except PlanError as error:
            outlooks[name] = error
    errors = [str(found) for found in outlooks.values() if isinstance(found, PlanError)]
    none = len(errors) == len(outlooks)
    if none and len(set(errors)) == 1:
        raise PlanError(f"on none of {len(outlooks)} machines: {errors[0]}")  # no machine's fault
    found_of = dict(sorted(outlooks.items(), key=lambda item: _rank(item[1], price)))
    if as_json:
        everything = {
            name: {"error": str(found)} if isinstance(found, PlanError) else found.to_json()
            for name, found in found_of.items()
        }
        print(json.dumps(everything, indent=2))
        return 2 if none else 0
    rows = ((_machine(name, found), *_cells(found, price)) for name, found in found_of.items())
    for line in aligned(columns([_HEAD, *rows])):
        print(line)
    print("\nbatch: samples at a time x micro-batches of each device; memory: predicted need of each device")
    print(f"Sorted by {'money' if price else 'time'}, which is an estimate {NOT_COUNTED}.")
    for note, machines in _notes(found_of).items():
        print(f"{note} ({some_of(machines)})")
    sources: dict[str, list[str]] = {}
    for name, found in found_of.items():
        if isinstance(found, Outlook) and found.cost.price is not None:
            sources.setdefault(found.cost.price.source, []).append(name)
    for source, priced in sources.items():
        print(f"Money: {source}{': ' + ', '.join(priced) if price == LIST else ' an hour for each device'}")
    return 2 if none else 0


_HEAD = ("GPU", "batch", "numerics", "memory", "step", "training", "energy", "money", "fits")


def _notes(found_of: Mapping[str, Outlook | PlanError]) -> dict[str, list[str]]:
    """Return what plans do in another way than was set, each with the machines that it is so on."""
    notes: dict[str, list[str]] = {}
    for name, found in found_of.items():
        for what, _, reason in () if isinstance(found, PlanError) else named_decisions(found.plan):
            if WARNS.search(reason) and what != "memory":  # that has a column
                note = f"{what}: {reason[max(0, reason.find('NOTE')) :]}"
                notes.setdefault(note, []).append(name)
    return notes


def _rank(found: Outlook | PlanError, price: str) -> tuple[float, ...]:
    """Return the sort key: machines on which the run fits, by money or by time, then by more steps."""
    if isinstance(found, PlanError):
        return (2,)
    memory, cost = found.plan.memory, found.cost
    fits = memory is None or memory.fits
    unpriced, total = bool(price) and cost.money is None, sum(cost.money or cost.seconds or (math.inf,))
    return (not fits, unpriced, total, -sum(cost.steps or (0,)))


def _machine(name: str, found: Outlook | PlanError) -> str:
    """Return the name, with the number of devices where there are several."""
    devices = 1 if isinstance(found, PlanError) else found.cost.devices
    return f"{name} ({devices} devices)" if devices > 1 and not name.endswith(f"x{devices}") else name


def _cells(found: Outlook | PlanError, price: str) -> tuple[str, ...]:
    if isinstance(found, PlanError):
        return *[""] * (len(_HEAD) - 2), f"no: {found}"
    decided, memory, cost = found.plan, found.plan.memory, found.cost
    ragged = decided.last_micro_batch < decided.micro_batch
    return (
        f"{decided.micro_batch} x {decided.accumulation - ragged}"
        + f" + {decided.last_micro_batch}" * ragged,
        f"{decided.precision}{', compiled' if decided.compile else ''}",
        "" if memory is None else format_need(memory),
        "" if found.step_time is None else found.step_time.span,
        format_training(cost),
        "not known" if cost.kwh is None else f"{range_text(*cost.kwh)} kWh",
        money_text(cost) if cost.money else "no list price" if price else "",
        "yes" if memory is None or memory.fits else "no: MORE than there is",
    )
