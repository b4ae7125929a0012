"""Device memory estimate of a run, by tracing the training loop's own step without the device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from lib.config import Config
from lib.devices.base import SimulatedBackend
from lib.devices.host import expandable_segments
from lib.memory.live import CUDA_GRANULARITY, LiveBytes, Trace
from lib.memory.simulation import simulation
from lib.nn.model_code import ModelCode
from lib.plan.fitting import GAPS, WORK, MemoryEstimator, Parts, RefusedBatchError, StepSettings, plan_of
from lib.plan.types import OWN_MEMORY, Hardware, Kind, Layout, Plan
from train.build import make_job, placement_of
from train.planning.traced_steps import Launches, run_traced
from train.record import Record
from train.tasks.base import optional_function
from train.training_data import TrainingData, stored_units

_SAVED = ("parameters", "optimizer", "averages")
_Key: TypeAlias = tuple[StepSettings, str]  # and the placement of the data
BEYOND = 1.1  # of the largest traced size, to which the line through smaller ones is believed
_ALONE = Layout(strategy="single", world=1, shard=1)
# Values of a field whose traces may be the same.
_ALIKE: Mapping[str, Mapping[Any, Any]] = {
    "precision": {"bf16": "fp16", "fp16": "bf16"},
    "device": {"cuda": "mps", "mps": "cuda"},
}
_IN_MAIN_MEMORY: tuple[Kind, ...] = ("cpu", "mps")


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTrace:
    """Memory traces of two optimizer steps and an evaluation batch, and the work of the second step.

    Of several devices trace and FLOP are of the one with most of it; the host launches kernels for all.
    """

    trace: Trace
    step_flop: int
    launches: Launches
    copied_bytes: int  # of a micro-batch, to main memory and back


class MemoryTraces:
    """Cached traces of training `config` on `data`, one per execution mode and micro-batch.

    Storages are affine in the micro-batch while the step is the same: between two traced sizes, and a bit
    beyond, the line through both is believed once it gave a third trace exactly. Else each is traced.
    Half precisions, and kinds of devices, whose traces are the same once are believed to be the same at all.
    """

    def __init__(self, config: Config, data: TrainingData) -> None:
        self._config, self._training_data = config, data
        self._found: dict[_Key, MemoryTrace | RefusedBatchError] = {}
        self._traced: dict[_Key, dict[int, MemoryTrace]] = {}  # by the mode with a micro-batch of 1, by size
        self._lines: dict[_Key, tuple[int, int]] = {}  # sizes that the believed line goes through
        self._same: dict[_Key, Mapping[str, Any]] = {}  # by `_family`, the fields of one that has its traces
        self._parts: dict[tuple[Any, ...], dict[str, int]] = {}
        self._units = functools.cache(functools.partial(stored_units, data, config))

    def of(self, step: StepSettings, hardware: Hardware) -> MemoryTrace:
        """Return the traces of `step`. hardware: matters only for data kept on the device.

        Raises RefusedBatchError if the model does not accept such a micro-batch.
        """
        return self._of(self._key(step, hardware), hardware)

    def _key(self, step: StepSettings, hardware: Hardware) -> _Key:
        world = 1 + step.several_devices
        placement, _ = placement_of(
            self._config, self._training_data, hardware, world=min(world, len(hardware.devices))
        )
        # Shares of a layout are scaled from a replica's trace; the compiler's memory is not traced.
        replica = step.layout.replica if step.layout is not None else None
        own = replica if replica is not None and replica.strategy != "single" else None
        device: Kind = "cuda" if step.device == "rocm" else step.device  # simulated alike
        step = dataclasses.replace(step, device=device, layout=own, compile=False)
        return dataclasses.replace(step, **self._same.get(_family(step, placement), {})), placement

    def _of(self, key: _Key, hardware: Hardware) -> MemoryTrace:
        if key not in self._found:
            step, mode = key[0], (dataclasses.replace(key[0], micro_batch=1), key[1])
            low, high = self._lines.get(mode, (0, -1))
            on_line = low <= step.micro_batch <= high * BEYOND
            found = affine(self._traced[mode], low, high, step.micro_batch) if on_line else None
            self._found[key] = found or self._trace(step, mode, hardware)
        if isinstance(result := self._found[key], RefusedBatchError):
            raise result
        return result

    def _trace(self, step: StepSettings, mode: _Key, hardware: Hardware) -> MemoryTrace | RefusedBatchError:
        """Trace `step`, and look for two traced sizes whose line goes through the trace."""
        known, size = self._traced.setdefault(mode, {}), step.micro_batch
        try:
            found = trace_memory(self._config, plan_of(step), self._training_data, hardware=hardware)
        except RefusedBatchError as error:
            return error
        low, high = self._lines.get(mode, (0, -1))
        if low <= size <= high * BEYOND:  # the line had no such trace
            del self._lines[mode]
        pairs = itertools.combinations(sorted(known), 2)
        for low, high in sorted(pairs, key=lambda pair: (pair[0], -pair[1])):
            if affine(known, low, high, size) == found:
                self._lines[mode] = min(low, size), max(high, size)
                break
        known[size] = found
        for name, alike in _ALIKE.items():
            own = {name: alike.get(getattr(step, name), getattr(step, name))}
            other = dataclasses.replace(mode[0], **own), mode[1]
            is_free = other != mode and _family(*other) not in self._same
            if is_free and self._traced.get(other, {}).get(size) == found:
                self._same.setdefault(_family(*mode), own)
        return found

    def least_peak(self, step: StepSettings, hardware: Hardware, *, without: Sequence[str]) -> int:
        """Return bytes of tensors at the peak of `step` if those of the categories `without` took none.

        Whatever changes nothing else needs at least that much.
        """
        nothing = dict.fromkeys(without, 0.0)
        return sum(self.of(step, hardware).trace.at_peak({**self._shares(step), **nothing}).values())

    def _shares(self, step: StepSettings) -> Mapping[str, float]:
        """Return the share of each category of memory that the fullest process holds; 1 where not listed."""
        layout, facts = step.layout or _ALONE, self._training_data.facts
        if layout.strategy == "pipeline":
            from lib.plan.stages import stage_shares

            return stage_shares(facts, layout)
        if layout.world > 1 and facts.units is not None:
            from lib.plan.sharding import shares

            return shares(self._units(step.precision), layout)
        return {}

    def predictor(self, hardware: Hardware, *, gaps: bool = True) -> MemoryEstimator:
        """Return a predictor of the memory of an optimizer step on `hardware`, without a device."""
        facts, config = self._training_data.facts, self._config

        @functools.cache  # parallelism strategies ask again for the plan's own
        def predict(step: StepSettings) -> Parts:
            layout, factors = step.layout or _ALONE, self._shares(step)
            key = self._key(step, hardware)
            found = self._of(key, hardware)
            trace = found.trace
            cached = key, step.device, tuple(sorted(factors.items())), gaps
            if cached not in self._parts:
                self._parts[cached] = with_gaps(trace, step.device, factors, gaps=gaps)
            parts = dict(self._parts[cached])
            if layout.strategy == "pipeline" and facts.stages is not None:
                from lib.plan.stages import buffer_bytes, most_samples

                sizes = {"samples": max(step.micro_batch, most_samples(config, layout))}
                sizes["micro_batch"] = step.micro_batch
                parts["stage buffers"] = buffer_bytes(facts.stages, layout, **sizes)
            if self._config.checkpoints.checkpoint_async and step.device in _IN_MAIN_MEMORY:
                # While the next step runs one process gathers the full state, or each has a copy of its own.
                is_sharded = self._config.checkpoints.checkpoint_format == "sharded"
                own = {**factors, "parameters": factors.get("averages", 1)} if is_sharded else {}
                peak = trace.at_peak()
                parts["checkpoint"] = round(sum(peak.get(each, 0) * own.get(each, 1) for each in _SAVED))
            forward, backward, update = found.launches
            flop = found.step_flop // (1 + step.accumulates)
            work = flop, forward + backward, update, found.copied_bytes
            return {**parts, **dict(zip(WORK, work, strict=True))}

        return predict


def _family(step: StepSettings, placement: str) -> _Key:
    return dataclasses.replace(step, micro_batch=1, accumulates=False), placement


def affine(traced: Mapping[int, MemoryTrace], low: int, high: int, size: int) -> MemoryTrace | None:
    """Return the trace of a micro-batch of `size` on the line through `traced` at `low` and `high`.

    None where their steps are not the same operations.
    """
    one, other = traced[low], traced[high]
    trace = one.trace.affine(other.trace, size - low, high - low) if one.launches == other.launches else None
    if trace is None:
        return None
    flop, copied = (
        first + (second - first) * (size - low) // (high - low)
        for first, second in ((one.step_flop, other.step_flop), (one.copied_bytes, other.copied_bytes))
    )
    return MemoryTrace(trace, flop, one.launches, copied)


def trace_memory(config: Config, plan: Plan, data: TrainingData, *, hardware: Hardware) -> MemoryTrace:
    """Trace the training of one rank under `plan`. Nothing is computed and no device is needed.

    Raises RefusedBatchError if the code of the model or task fails with such a micro-batch.
    """
    what = f"training {config.model} fails with a micro-batch of {plan.micro_batch}"

    def refused(why: str) -> RefusedBatchError:
        return RefusedBatchError(what, why=why)

    effective_batch = plan.shares[0]
    layout = plan.layout.replica
    own: dict[str, Any] = {"strategy": layout.strategy, "effective_batch": effective_batch}
    alone = dataclasses.replace(plan, world=1, shard=1, cuda_graphs=False, **own)  # graphs hide operators
    config = _to_measure(config)
    live = LiveBytes(granularity=1 if plan.device == "cpu" else CUDA_GRANULARITY)
    with simulation(plan.device):
        backend = SimulatedBackend(
            plan.device, averages_gradients=plan.world > 1, devices=layout.devices_per_process
        )
        with live:
            resident = _resident(config, plan, data, hardware)
            live.add(resident, "data")
            job = make_job(config, alone, data, hardware=hardware, backend=backend, record=Record())
            built = live.position if config.weights.adapt != "full" else 0  # not as what they were made of
            with ModelCode(config.model, refused, torchs=True):
                work = run_traced(job, live)
            traces = [live.trace(device, without=built) for device in backend.devices]
            del resident  # only now: the data stay on the device throughout
    return MemoryTrace(fullest(traces, plan.device), *work)


def with_gaps(
    trace: Trace, device: Kind, shares: Mapping[str, float] = MappingProxyType({}), *, gaps: bool = True
) -> dict[str, int]:
    """Return bytes by category at the peak, and with `gaps` what the allocator loses between them."""
    parts = trace.at_peak(shares)
    if gaps and device in OWN_MEMORY:
        from lib.memory.allocator import least_capacity

        expandable = device == "cuda" and expandable_segments()
        need = least_capacity(trace.history(shares), expandable=expandable)
        parts[GAPS] = max(0, need - sum(parts.values()))
    return parts


def fullest(traces: Sequence[Trace], device: Kind) -> Trace:
    """Return the trace of the device that needs most: fragmentation can outweigh a higher live peak."""
    if len(traces) == 1:
        return traces[0]
    return max(traces, key=lambda trace: sum(with_gaps(trace, device).values()))


def _resident(config: Config, plan: Plan, data: TrainingData, hardware: Hardware) -> list[torch.Tensor]:
    """Allocate the data that are kept on the device."""
    placement, _ = placement_of(config, data, hardware, world=plan.world)
    parts = (data.dataset.train, data.dataset.test) if placement == "resident" else ()
    return [torch.empty(part.byte_size, dtype=torch.uint8) for part in parts]


def _to_measure(config: Config) -> Config:
    """Return `config` with the cheapest options of its task that need the same memory."""
    shorten = optional_function(config, "to_measure")
    return config if shorten is None else config.replace(task_options=shorten(config.task_options))
