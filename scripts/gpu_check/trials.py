"""The worker's handlers, on the GPU: arguments and results are what JSON can hold."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import importlib.util
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lib.data.loader import Batch
from lib.data.types import Spec, TextSpec
from lib.errors import ToolkitError
from lib.memory.allocator import replay
from lib.nn.compile import release_programs
from lib.plan.fitting import GAPS, Parts
from scripts.gpu_check.cases import (
    CASES,
    Opened,
    Setting,
    Training,
    is_predicted_to_fit,
    open_setting,
    predicted_parts,
    table_choice,
    training_of,
)
from train.planning.memory_estimate import trace_memory
from train.planning.step_estimate import step_time_of

TIMED_STEPS = 5
RESOLUTION = 50  # a search ends within a fiftieth of the largest size
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
SAMPLES = 1 << 16


def context(dtype: str) -> dict[str, Any]:
    """Measure bytes in use outside of the allocator: before the context, after first uses of libraries."""
    used_before = device_used_bytes()
    stages: dict[str, int] = {}

    def note(stage: str) -> None:
        torch.cuda.synchronize()
        stages[stage] = device_used_bytes() - used_before - torch.cuda.memory_reserved()

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    torch.zeros(1, device="cuda")
    note("context")
    _use_libraries(getattr(torch, dtype), note)
    gc.collect()
    return {
        "used_before_bytes": used_before,
        "outside_allocator_bytes": stages,
        "free_after_context_bytes": free_bytes,
        "total_bytes": total_bytes,
        "kept_by_libraries_bytes": torch.cuda.memory_allocated(),  # no tensor is left
    }


def measure(setting: dict[str, Any], limit_bytes: int | None = None, timed: bool = False) -> dict[str, Any]:
    """Measure memory and time of three optimizer steps and an evaluation of `setting`."""
    _start_afresh(limit_bytes)
    training = training_of(open_setting(Setting(**setting)))
    first_seconds = training.run(steps=1)
    training.run(steps=2)
    answer = {"first_step_seconds": first_seconds, **_memory()}
    answer["planned_cuda_graphs"] = training.job.plan.cuda_graphs
    if timed:
        seconds = statistics.median(training.run(steps=1) for _ in range(TIMED_STEPS))
        rate = training.job.plan.effective_batch / seconds
        answer |= {"step_seconds": seconds, "samples_per_second": rate}
    return answer


def history(setting: dict[str, Any], expandable: bool) -> dict[str, Any]:
    """Record two optimizer steps with torch's allocator, and replay them with the simulated one.

    expandable: with expandable segments or without.
    """
    _start_afresh(None)
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    torch.cuda.memory._record_memory_history(context=None, max_entries=2_000_000)
    training_of(open_setting(Setting(**setting))).run(steps=2)
    traces = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    real = _memory()
    started = time.perf_counter()
    simulated = replay(events_of(traces[0]), expandable=expandable)
    return {
        **real,
        "events": len(traces[0]),
        "simulated_allocated_bytes": simulated.peak_allocated_bytes,
        "simulated_reserved_bytes": simulated.peak_reserved_bytes,
        "replay_seconds": time.perf_counter() - started,
    }


def predict(setting: dict[str, Any]) -> dict[str, Any]:
    """Predict the peak of `setting` by category, and time the prediction."""
    started = time.perf_counter()
    parts = dict(predicted_parts(open_setting(Setting(**setting))))
    gaps = parts.pop(GAPS, 0)
    return {
        "peak_bytes": sum(parts.values()),
        "parts": parts,
        "gaps_bytes": gaps,
        "seconds": time.perf_counter() - started,
    }


def estimate(setting: dict[str, Any]) -> dict[str, Any]:
    """Estimate the time of a step of `setting`; empty for a GPU that is not in the catalogue."""
    config, data, hardware, plan = open_setting(Setting(**setting))
    found = trace_memory(config, plan, data, hardware=hardware)
    estimated = step_time_of(plan, found, data, config, hardware)
    return {} if estimated is None else dataclasses.asdict(estimated)


def choose(setting: dict[str, Any], free_bytes: list[int], most: int) -> dict[str, Any]:
    """Return the micro-batches that table and prediction choose for several sizes of free memory."""
    requested = Setting(**setting)
    table = [table_choice(requested, free_bytes=free) for free in free_bytes]

    @functools.cache  # one size is asked about for several cards
    def opened(size: int) -> tuple[Opened, Parts]:
        this = open_setting(dataclasses.replace(requested, micro_batch=size))
        return this, predicted_parts(this)

    def predicted(free: int, start: int) -> int:
        def fits(size: int) -> bool:
            return is_predicted_to_fit(*opened(size), free_bytes=free)

        return largest(fits, start=start, step=CASES[requested.case].step, most=most)

    return {"table": table, "predicted": [predicted(*pair) for pair in zip(free_bytes, table, strict=True)]}


def largest(works: Callable[[int], bool], *, start: int, step: int, most: int) -> int:
    """Return the largest multiple of `step` up to `most` that works, to within 2 %; 0 if `step` does not.

    works: true up to some size and false from there on. The better `start` is, the fewer calls it takes.
    """
    low, high, failed = 0, (most // step + 1) * step, False  # low works, high does not or is too large
    size = max(step, min(start, most) // step * step)
    jump = max(step, size // 16 // step * step)
    while high - low > max(step, low // RESOLUTION // step * step):
        if works(size):
            low, jump = size, 2 * jump
        else:
            high, failed = size, True
        middle = max(low + step, (low + high) // 2 // step * step)
        size = middle if failed else min(low + jump, high - step)
    return low


def events_of(trace: Iterable[Mapping[str, Any]]) -> list[tuple[int, int | None]]:
    """Convert an allocator's recorded history to events for `lib.memory.allocator.replay`."""
    events: list[tuple[int, int | None]] = []
    for entry in trace:
        if entry["action"] == "alloc":
            events.append((entry["addr"], entry["size"]))
        elif entry["action"] == "free_completed":
            events.append((entry["addr"], None))
    return events


def device_used_bytes() -> int:
    """Return the bytes in use on the first GPU by nvidia-smi, which opens no context here."""
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0")
    shown = subprocess.run(query, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise RuntimeError(f"nvidia-smi: {(shown.stderr or shown.stdout).strip()}")
    return int(shown.stdout.split()[0]) * 2**20


def _use_libraries(dtype: torch.dtype, note: Callable[[str], None]) -> None:
    factor = torch.randn(2048, 2048, device="cuda", dtype=dtype, requires_grad=True)
    product = factor @ factor
    note("matmul")
    images = torch.randn(16, 64, 56, 56, device="cuda", dtype=dtype)
    weight = torch.randn(64, 64, 3, 3, device="cuda", dtype=dtype, requires_grad=True)
    maps = torch.nn.functional.conv2d(images, weight, padding=1)
    note("conv")
    torch.autograd.backward(product.float().sum() + maps.float().sum())
    note("backward")


def _start_afresh(limit_bytes: int | None) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # statistics cannot be reset before
    release_programs()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit_bytes is None else limit_bytes / total)


def _memory() -> dict[str, Any]:
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def installed() -> str | None:
    """Return the name of the package that has the finder, if one is installed."""
    found = (name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None)
    return next(found, None)


def find_batch_size(setting: dict[str, Any], mode: str, limit_bytes: int) -> dict[str, Any]:
    """Return the batch that the finder chooses in `mode` (power or binsearch), and its time.

    It gets the network, loss, optimizer and precision of `setting`, and Lightning's own loop.

    limit_bytes: limit of the allocator. Raises ToolkitError where Lightning is not installed.
    """
    package = installed()
    if package is None:
        raise ToolkitError("Lightning is not installed")
    lightning = importlib.import_module(package)
    tuner_of = importlib.import_module(f"{package}.tuner").Tuner
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    opened = open_setting(Setting(**setting))
    data = _data_module(lightning, opened.data.dataset.spec)
    module = _module(lightning, training_of(opened))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="gpu",
            devices=1,
            precision="bf16-mixed" if opened.plan.precision == "bf16" else "32-true",
            max_epochs=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        started = time.perf_counter()
        found = tuner_of(trainer).scale_batch_size(module, datamodule=data, mode=mode)
        seconds = time.perf_counter() - started
    return {"batch": found, "seconds": seconds, "version": lightning.__version__}


def _data_module(lightning: Any, spec: Spec) -> Any:
    if isinstance(spec, TextSpec):
        tokens = torch.randint(spec.vocab_size, spec.input_shape)
        sample = tokens, tokens.roll(-1)
    else:
        sample = torch.randn(spec.input_shape), torch.tensor(0)
    samples: Any = [sample] * SAMPLES  # any sequence is a data set to a DataLoader

    class Data(lightning.LightningDataModule):  # type: ignore[misc, unused-ignore]
        batch_size = 2  # the finder changes it

        def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
            return DataLoader(samples, batch_size=self.batch_size)

    return Data()


def _module(lightning: Any, training: Training) -> Any:
    job = training.job

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.network = job.model

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:  # noqa: ARG002
            sums = job.task.training(self.network, Batch(*batch))
            return sums.loss / sums.count

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer

    return Module()


HANDLERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "context": context,
    "measure": measure,
    "history": history,
    "predict": predict,
    "estimate": estimate,
    "choose": choose,
    "lightning": find_batch_size,
}
