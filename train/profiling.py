"""`make profile`: a torch.profiler trace of steps of the training loop, and a summary of that trace.

CUDA: not run on hardware; the summary is tested on synthetic traces.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.profiler
from torch.profiler import ProfilerActivity, record_function

from lib import atomic, kconf
from lib.config import Config, config_from_values
from lib.data.loader import Batch
from lib.devices.backend import open_backend
from lib.devices.probe import probe
from lib.distributed.launcher import become_worker, end_process, launch
from lib.errors import os_errors, run_main
from lib.plan.placement import refuse_static_shapes
from lib.plan.types import Hardware, Plan
from lib.tiers import with_tier
from lib.units import seconds_text
from train import loop
from train.build import check_run, make_job
from train.job import Budget, Progress
from train.planning.run_plan import predicted_plan, refuse
from train.record import Record, log
from train.signals import Stopped
from train.training_data import TrainingData, open_to_train, open_training_data

WARM_UP = 5  # steps before those of the trace: they create the optimizer's state and compile
TOP = 12  # operations in the summary
DATA_WAIT = "anneal.data_wait"
NEVER = 10**9  # steps
# Evaluations and checkpoints are no part of a step.
STEPS_ONLY = {"eval_interval_steps": NEVER, "checkpoint_interval_steps": NEVER, "checkpoint_seconds": 0}
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events of the device
_PRODUCTS = re.compile(
    r"\w+::(mm|bmm|addmm|baddbmm|mv|addmv|linear|\w*_linear\w*|_\w+_mm|_addmm\w*"
    r"|\w*conv(olution|[123]d|_)\w*|\w*(flash|efficient|cudnn|dot_product)\w*attention\w*)"
)
_COMMUNICATION = re.compile(r"c10d::|gloo:|nccl|_c10d_functional::")
_SYNCHRONISATION = re.compile(r"(cuda|hip)\w*Synchronize\w*|aten::_local_scalar_dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a trace; times in microseconds, of all steps.

    on_device: operations are timed by their kernels. idle: of the device, or outside operators on a CPU.
    exposed: communication while the device computes nothing. counts: of host synchronisations.
    operations: (name, self time, calls), the longest first; products: self time of matrix products.
    """

    steps: int
    on_device: bool
    duration: float
    data_wait: float
    idle: float
    communication: float
    exposed: float
    products: float
    counts: Mapping[str, int]
    operations: Sequence[tuple[str, float, int]]

    def lines(self) -> Iterator[str]:
        """Format the figures."""
        busy = sum(time for _, time, _ in self.operations) or 1.0
        hidden = f", {self.exposed / self.duration:.1%} not hidden by computation" if self.on_device else ""
        outside = "the device is idle" if self.on_device else "the training thread is outside operators"
        waits = "waits for the device" if self.on_device else "reads of values by the host (a GPU would wait)"
        whose = "time of kernels" if self.on_device else "time without called operations"
        each = seconds_text(self.duration / self.steps / 1e6)
        yield f"{self.steps} steps, {each} each with the profiler's own time"
        yield f"{self.data_wait / self.duration:7.1%}  of it the loop waits for data"
        yield f"{self.idle / self.duration:7.1%}  {outside}"
        yield f"{self.communication / self.duration:7.1%}  communication between processes{hidden}"
        yield f"{self.products / busy:7.1%}  of the time of operations is matrix products"
        counts = ", ".join(f"{name} {count / self.steps:.1f}" for name, count in sorted(self.counts.items()))
        yield f"In a step, {waits}: {counts or 'none'}"
        yield f"\n{'share':>7} {'ms':>9} {'calls':>7}  in a step, by {whose}"
        for name, time, calls in self.operations[:TOP]:
            yield f"{time / busy:7.1%} {time / self.steps / 1e3:9.3f} {calls / self.steps:7.1f}  {name}"


def summarize(events: Iterable[Mapping[str, Any]]) -> Summary:
    """Return the figures of a Chrome trace whose steps are marked by torch.profiler."""
    spans = [event for event in events if event.get("ph") == "X"]
    notes = [one for one in spans if one["cat"] == "user_annotation"]
    marks = [one for one in notes if one["name"].startswith("ProfilerStep#")]
    begin, end = min(one["ts"] for one in marks), max(one["ts"] + one["dur"] for one in marks)
    spans = [one for one in spans if begin <= one["ts"] < end]
    operators = [one for one in spans if one["cat"] == "cpu_op"]
    kernels = [one for one in spans if one["cat"] in _DEVICE]
    names = {one["args"].get("External id"): one["name"] for one in operators if kernels}
    timed = [(names.get(one["args"].get("External id"), one["name"]), one["dur"]) for one in kernels]
    busy = kernels or [one for one in operators if one["tid"] == marks[0]["tid"]]
    sent = [one for one in kernels or spans if _COMMUNICATION.match(one["name"])]
    times, calls = defaultdict[str, float](float), Counter[str]()
    for name, time in timed or self_times(operators):
        times[name] += time
        calls[name] += 1
    covered = partial(union, until=end)
    syncs = [one["name"] for one in spans if _SYNCHRONISATION.fullmatch(one["name"])]
    return Summary(
        steps=len(marks),
        on_device=bool(kernels),
        duration=end - begin,
        data_wait=covered(one for one in notes if one["name"] == DATA_WAIT and begin <= one["ts"] < end),
        idle=end - begin - covered(busy),
        communication=covered(sent),
        exposed=covered(kernels) - covered(one for one in kernels if one not in sent),
        products=sum(time for name, time in times.items() if _PRODUCTS.fullmatch(name)),
        counts=Counter(name.replace("aten::_local_scalar_dense", ".item()") for name in syncs),
        operations=[(name, times[name], calls[name]) for name in sorted(times, key=times.__getitem__)[::-1]],
    )


def union(spans: Iterable[Mapping[str, Any]], *, until: float) -> float:
    """Return the time that the spans cover together before `until`."""
    covered, reached = 0.0, 0.0
    for begin, end in sorted((one["ts"], min(one["ts"] + one["dur"], until)) for one in spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def self_times(operators: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the name and the time of each operator without those that it calls."""
    threads = defaultdict(list)
    for one in operators:
        threads[one["tid"]].append((one["ts"], -one["dur"], one["name"]))
    for calls in threads.values():
        open_calls: list[list[Any]] = []  # name, end, own time
        for begin, negative, name in [*sorted(calls), (float("inf"), 0.0, "")]:
            while open_calls and open_calls[-1][1] <= begin:
                yield open_calls[-1][0], open_calls.pop()[2]
            if open_calls:
                open_calls[-1][2] += negative
            open_calls.append([name, begin - negative, -negative])


@contextmanager
def _without_marks(file: Path) -> Iterator[None]:
    """Append to `file` what is written to descriptor 2, and repeat what is no mark of a start or stop.

    KINETO_LOG_LEVEL has no value that leaves out these marks, whose level is USDT, and keeps errors.
    """
    kept = os.dup(2)
    with file.open("a+b") as log:
        begin = log.seek(0, os.SEEK_END)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            log.seek(begin)
            os.write(2, b"".join(line for line in log if not line.startswith(b"USDT:")))


class _Enough(Exception):
    """Raised after the last step of the trace."""


def profile(requested: kconf.Resolved | None, *, root: Path, steps: int, out: Path) -> int:
    """Profile steps of the configured run; write trace.json.gz and summary.txt into `out`.

    requested: None in one of several processes that were launched for it.
    """
    launched = become_worker()
    if launched is not None:
        plan, hardware = Plan.from_json(launched["plan"]), Hardware.from_json(launched["hardware"])
        resolved = kconf.Resolved.from_json(launched["configuration"])
        config = config_from_values(resolved.values).replace(**STEPS_ONLY)
        data = open_training_data(config, root=root, log=lambda _: None)
        end_process(run_main(lambda: _profile(config, plan, data, hardware, steps=steps, out=out)))
    assert requested is not None
    atomic.check_writable(out, "OUT", log=log)
    resolved = with_tier(requested, root=root, log=log)
    config = config_from_values(resolved.values).replace(**STEPS_ONLY)
    hardware = probe(config.device)
    refuse_static_shapes(hardware.kind, what="make profile")
    data = open_to_train(config, root=root, log=log, refuse=refuse)
    plan, _ = predicted_plan(config, data, hardware)
    check_run(config, plan, data)
    if plan.world > 1:
        payload = {"plan": plan.to_json(), "hardware": hardware.to_json()}
        payload["configuration"] = resolved.to_json()
        launch(payload, world=plan.world, restarts=0, cpu_count=hardware.cpu_count, arguments=sys.argv[1:])
    return _profile(config, plan, data, hardware, steps=steps, out=out)


def _profile(
    config: Config, plan: Plan, data: TrainingData, hardware: Hardware, *, steps: int, out: Path
) -> int:
    backend = open_backend(plan.device, world=plan.world, devices=plan.layout.devices_per_process)
    trace, summary = out / "trace.json.gz", out / "summary.txt"
    if backend.is_main:
        with os_errors("create a folder", todo="OUT= names another place"):
            out.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (backend.device.type == "cuda")],
        schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(trace)) if backend.is_main else None,
    )

    if backend.is_main:  # the others write to rank logs
        notes = out / "profiler.log"
        notes.write_bytes(b"")
        for name in ("step", "stop"):
            setattr(profiler, name, _without_marks(notes)(getattr(profiler, name)))

    def end_step(step: int, fraction: float) -> None:  # noqa: ARG001
        profiler.step()
        if step == WARM_UP + steps:
            raise _Enough

    job = make_job(config, plan, data, hardware=hardware, backend=backend, record=Record())
    job.budget = Budget(total_steps=NEVER, total_seconds=None)
    job.record.progress = end_step  # type: ignore[method-assign]
    job.train_loader.micro_batches = _marked(job.train_loader.micro_batches)  # type: ignore[method-assign]
    try:
        with job.train_loader, job.eval_loader, profiler:
            loop.train(job, Progress())
    except _Enough:
        pass
    except Stopped as error:
        raise KeyboardInterrupt from error  # there is nothing to resume
    if backend.is_main:
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            found = summarize(json.load(file)["traceEvents"])
        each = f"{plan.precision}, {plan.effective_batch} samples a step"
        text = "\n".join([f"{config.model} on {backend.device.type}, {each}", *found.lines()])
        atomic.write_text(summary, text + "\n")
        log(f"{text}\n\nWritten: {summary} and {trace}, which opens at ui.perfetto.dev")
    backend.close()
    return 0


def _marked(micro_batches: Callable[..., Iterator[Batch]]) -> Callable[..., Iterator[Batch]]:
    def marked(**request: Any) -> Iterator[Batch]:
        batches = micro_batches(**request)
        return iter(record_function(DATA_WAIT)(lambda: next(batches, None)), None)

    return marked
