"""How many runs of a sweep train at a time: as many as there are processors and memory for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import kconf
from lib.errors import ConfigError, ToolkitError, told_in
from lib.plan.tables import FREE_MEMORY_MARGIN
from lib.plan.types import Hardware
from lib.units import bytes_text

# What memory does not depend on. (Of a fraction only on whether it is 0: momentum, dropout.)
_OF_LENGTH = {"SEED", "NUM_EPOCHS", "MAX_STEPS", "MAX_SECONDS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What there is, and what the hungriest of some runs takes of it.

    run_bytes: of main memory, by all processes of a run; None where nobody could predict it.
    why: how that was found, or why it was not.
    """

    hardware: Hardware
    run_bytes: float | None
    processes: int
    why: str

    @property
    def usable_bytes(self) -> float:
        return self.hardware.devices[0].free_bytes * FREE_MEMORY_MARGIN


Predict = Callable[[Sequence[kconf.Resolved]], Demand]


class Crew:
    """Lets so many runs train at a time. jobs: how many are asked for; None: as many as fit."""

    def __init__(self, jobs: int | None, predict: Predict) -> None:
        if jobs is not None and jobs < 1:
            raise ConfigError(f"JOBS={jobs} is no number of runs at a time")
        self.workers, self.most = 1, 1
        self._jobs, self._predict = jobs, predict
        self._demand: Demand | None = None
        self._busy = 0
        self._changed = threading.Condition()

    def choose(self, configurations: Sequence[kconf.Resolved], *, most: int) -> str:
        """Decide for runs like these, `most` of which could train at a time; why, in a line."""
        if self._jobs == 1 or most <= 1:
            return f"1 worker: {'JOBS=1' if self._jobs else 'there is 1 run to train'}"
        self._demand = self._predict(distinct(configurations))
        self.most = min(most, self._jobs or self._demand.hardware.cpu_count)
        self.workers, line = decide(self._demand, jobs=self._jobs, most=most)
        return line

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Wait until one more may train; within, one does."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy < self.workers)
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def learn(self, peak_bytes: float) -> str:
        """Decide again where a run, which still has its place, took more than was known.

        Returns a line where that changes something.
        """
        with self._changed:
            if self._demand is None or peak_bytes <= (self._demand.run_bytes or 0):
                return ""
            before, known = self.workers, self._demand.run_bytes
            self._demand = dataclasses.replace(self._demand, run_bytes=peak_bytes, why="as one took")
            self.workers, line = decide(self._demand, jobs=self._jobs, most=self.most)
            full = self.workers * peak_bytes > self._demand.usable_bytes >= self.workers * (known or 0)
            return line if self.workers != before or full else ""


def decide(demand: Demand, *, jobs: int | None, most: int) -> tuple[int, str]:
    """How many of `most` runs train at a time, and why."""
    hardware = demand.hardware
    if hardware.kind != "cpu":
        name = hardware.devices[0].name
        if jobs is None:
            return 1, f"1 worker: runs on {name} train one at a time, each with all memory that is free"
        shared = f"JOBS={jobs}; WARNING: they share {name}, and each plans with what is free when it begins"
        return jobs, f"{jobs} workers: {shared}"
    if demand.run_bytes is None:
        if jobs is not None:
            return jobs, f"{jobs} workers: JOBS={jobs}; whether they fit is not known: {demand.why}"
        return 1, f"1 worker until one run is measured: its memory is not predicted ({demand.why})"
    usable_bytes = demand.usable_bytes
    fit = max(1, int(usable_bytes // demand.run_bytes))
    workers = min(most, jobs or max(1, min(hardware.cpu_count // demand.processes, fit)))
    processors = f"{hardware.cpu_count} processor{'s' if hardware.cpu_count > 1 else ''}"
    room = f"{bytes_text(usable_bytes)} of {bytes_text(hardware.devices[0].free_bytes)} free may be used"
    parts = [processors, f"a run needs {bytes_text(demand.run_bytes)} ({demand.why}), {room}"]
    if workers * demand.run_bytes > usable_bytes:
        parts.append(f"WARNING: {workers} need {bytes_text(workers * demand.run_bytes)}")
    if workers * demand.processes > hardware.cpu_count:
        parts.append(f"WARNING: {workers * demand.processes} processes wait for each other")
    asked = f"JOBS={jobs}; " if jobs else ""
    return workers, f"{workers} worker{'s' if workers > 1 else ''}: {asked}{'; '.join(parts)}"


def distinct(configurations: Sequence[kconf.Resolved]) -> list[kconf.Resolved]:
    """One of each kind that may differ in memory."""

    def key(values: Mapping[str, Any]) -> str:
        kept = {
            name: value != 0 if isinstance(value, float) else value
            for name, value in values.items()
            if name not in _OF_LENGTH
        }
        return json.dumps(kept, sort_keys=True)

    return list({key(each.values): each for each in configurations}.values())


def predicted(
    configurations: Sequence[kconf.Resolved], *, root: Path, say: Callable[[str], object]
) -> Demand:
    """What `python -m train demand` says of them: this process stays small, for those that it starts count
    its memory as theirs. Raises ToolkitError where it comes to no end."""
    if len(configurations) > 1:
        say(f"Predicting what runs of {len(configurations)} kinds take of memory")  # seconds for each
    with tempfile.TemporaryDirectory(prefix="anneal-demand-") as folder:
        order = Path(folder, "order.json")
        order.write_text(json.dumps([each.to_json() for each in configurations]), encoding="utf-8")
        command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "train", "demand"]
        done = subprocess.run(
            [*command, str(order)],
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            why = told_in(done.stderr) or f"it ended with status {done.returncode}"
            raise ToolkitError("what a run takes cannot be predicted", why=why, todo="JOBS=1 does without")
        found = json.loads(order.with_name("answer.json").read_text(encoding="utf-8"))
    return Demand(**{**found, "hardware": Hardware.from_json(found["hardware"])})
