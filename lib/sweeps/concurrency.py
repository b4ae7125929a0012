"""Number of runs of a sweep that train at a time: as many as CPUs and memory allow."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib import kconf
from lib.errors import ToolkitError, error_in
from lib.plan.tables import FREE_MEMORY_MARGIN
from lib.plan.types import Hardware
from lib.units import bytes_text, counted

# Symbols on which memory does not depend. Of fractions (momentum, dropout) only being 0 or not matters.
_WITHOUT_MEMORY = {"SEED", "NUM_EPOCHS", "MAX_STEPS", "MAX_SECONDS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryEstimate:
    """Hardware, and the largest host memory of some runs.

    run_bytes: of all processes of a run; None where it cannot be predicted.
    why: how that was found, or why it was not.
    """

    hardware: Hardware
    run_bytes: float | None
    processes: int
    why: str

    @property
    def usable_bytes(self) -> float:
        """Free memory less a safety margin."""
        return self.hardware.devices[0].free_bytes * FREE_MEMORY_MARGIN


Predict = Callable[[Sequence[kconf.Resolved]], HostMemoryEstimate]


class Concurrency:
    """Limit on the runs that train at a time. jobs: the requested number; None for as many as fit."""

    def __init__(self, jobs: int | None, predict: Predict) -> None:
        self.workers, self.max_workers = 1, 1
        self.took: list[tuple[str, float]] = []  # points and seconds of the runs that were trained so far
        self._jobs, self._predict = jobs, predict
        self._estimate: HostMemoryEstimate | None = None
        self._busy = 0
        self._changed = threading.Condition()

    def choose(self, configurations: Sequence[kconf.Resolved], *, runs: int) -> str:
        """Choose the number of workers for `runs` runs such as these; returns the reason in a line."""
        if self._jobs == 1 or runs <= 1:
            return f"1 worker: {'JOBS=1' if self._jobs else 'there is 1 run to train'}"
        self._estimate = self._predict(distinct(configurations))
        self.max_workers = min(runs, self._jobs or self._estimate.hardware.cpu_count)
        self.workers, line = choose_workers(self._estimate, jobs=self._jobs, runs=runs)
        return line

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Wait until a worker is free and hold it for the block."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < self.workers)
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def record_peak(self, peak_bytes: float) -> str:
        """Choose again where a run, which still holds its slot, used more memory than estimated.

        Returns a line where that changes something, "" otherwise.
        """
        with self._changed:
            if self._estimate is None or peak_bytes <= (self._estimate.run_bytes or 0):
                return ""
            before, known = self.workers, self._estimate.run_bytes
            self._estimate = dataclasses.replace(self._estimate, run_bytes=peak_bytes, why="measured")
            self.workers, line = choose_workers(self._estimate, jobs=self._jobs, runs=self.max_workers)
            usable_bytes = self._estimate.usable_bytes
            newly_full = self.workers * peak_bytes > usable_bytes >= self.workers * (known or 0)
            return line if self.workers != before or newly_full else ""


def choose_workers(estimate: HostMemoryEstimate, *, jobs: int | None, runs: int) -> tuple[int, str]:
    """Return how many of `runs` runs train at a time, and the reason in a line."""
    hardware, run_bytes = estimate.hardware, estimate.run_bytes
    if hardware.kind != "cpu":
        name = hardware.devices[0].name
        if jobs is None:
            return 1, f"1 worker: runs on {name} train one at a time, each with all free memory"
        shared = f"JOBS={jobs}; WARNING: they share {name}, and each plans with what is free when it starts"
        return jobs, f"{jobs} workers: {shared}"
    if run_bytes is None:
        if jobs is not None:
            return jobs, f"{jobs} workers: JOBS={jobs}; whether they fit is not known: {estimate.why}"
        return 1, f"1 worker until one run is measured: its memory is not predicted ({estimate.why})"
    usable_bytes = estimate.usable_bytes
    fitting = max(1, int(usable_bytes // run_bytes))
    workers = min(runs, jobs or max(1, min(hardware.cpu_count // estimate.processes, fitting)))
    free = bytes_text(hardware.devices[0].free_bytes)
    parts = [
        *([f"JOBS={jobs}"] if jobs else []),
        counted(hardware.cpu_count, "CPU"),
        f"a run needs {bytes_text(run_bytes)} ({estimate.why})",
        f"{bytes_text(usable_bytes)} of {free} free are usable",
    ]
    if workers * run_bytes > usable_bytes:
        parts.append(f"WARNING: {workers} need {bytes_text(workers * run_bytes)}")
    if workers * estimate.processes > hardware.cpu_count:
        parts.append(f"WARNING: {workers * estimate.processes} processes share them")
    return workers, f"{counted(workers, 'worker')}: {'; '.join(parts)}"


def distinct(configurations: Sequence[kconf.Resolved]) -> list[kconf.Resolved]:
    """Return one configuration of each group that may differ in memory."""
    found = {}
    for each in configurations:
        kept = {name: value for name, value in each.values.items() if name not in _WITHOUT_MEMORY}
        kept |= {name: value != 0 for name, value in kept.items() if isinstance(value, float)}
        found[json.dumps(kept, sort_keys=True)] = each
    return [*found.values()]


def predict_host_memory(
    configurations: Sequence[kconf.Resolved], *, root: Path, log: Callable[[str], object]
) -> HostMemoryEstimate:
    """Return the estimate that `python -m train host_memory` makes of the configurations.

    It is made in another process, since the memory of this one counts as that of each child that it starts.
    Raises ToolkitError where the prediction fails.
    """
    if len(configurations) > 1:
        log(f"Predicting the memory of {len(configurations)} kinds of runs")  # seconds for each
    with tempfile.TemporaryDirectory(prefix="anneal-host-memory-") as folder:
        request = Path(folder, "request.json")
        request.write_text(json.dumps([each.to_json() for each in configurations]), encoding="utf-8")
        command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "train", "host_memory", str(request)]
        done = subprocess.run(command, cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            why = error_in(done.stderr) or f"it ended with status {done.returncode}"
            raise ToolkitError("the memory of a run cannot be predicted", why=why, todo="use JOBS=1")
        answer = json.loads(request.with_name("answer.json").read_text(encoding="utf-8"))
    return HostMemoryEstimate(**{**answer, "hardware": Hardware.from_json(answer["hardware"])})
