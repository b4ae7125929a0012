"""Training runs of a sweep in child processes, with their cost and how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from lib import atomic
from lib.errors import Suspended, ToolkitError, error_in, signal_name
from lib.kconf import Resolved
from lib.runs.directory import RunDir, age, is_run_name
from lib.runs.identity import trains

_KIBIBYTES_PER_MEGABYTE = 1e6 / 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Item = TypeVar("Item")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRun:
    """Outcome of one training process.

    run: the run directory; None where training did not finish, for the given `reason`.
    stopped: a signal stopped it; training it again resumes it.
    """

    run: RunDir | None
    reason: str
    stopped: bool
    seconds_cpu: float
    peak_memory_mb: float


def runs_of(place: Path, resolved: Resolved) -> list[RunDir]:
    """Return the runs of `resolved` under `place`, newest first: the first unfinished one would resume.

    Raises ToolkitError where a process that outlived its sweep still trains there.
    """
    for run in (found := _runs(place)):
        run.lock()
        run.release()
    return [run for run in found if trains(run, resolved)]


class Children:
    """Context that runs training processes concurrently, each in a place of its own.

    The first SIGTERM or SIGINT, or a stop of one of them, is passed on as SIGTERM: they save and exit, and no
    further one is started. A later SIGINT kills the rest and is raised.
    """

    def __init__(self) -> None:
        self.stopped_by = ""  # the signal or other cause
        self._lock = threading.RLock()  # a signal may come while another one is handled
        self._running: set[int] = set()
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def map(self, function: Callable[[Item], Out], items: Iterable[Item], *, workers: int) -> list[Out]:
        """Return `function`, which may call `train`, of each of `items`, with `workers` threads."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, items))

    def check(self, *, todo: str) -> None:
        """Raise Suspended where the children were stopped."""
        if self.stopped_by:
            raise Suspended(f"stopped by {self.stopped_by}", todo=todo)

    def train(self, place: Path, configuration: str, *, root: Path, threads: int | None = 1) -> ChildRun:
        """Train the text `configuration` under `place`, resuming an interrupted run. For use in `map`.

        root: the source tree. threads: of its products, None for as many as fit. Raises ToolkitError where
        training succeeds and leaves no finished run.
        """
        place.mkdir(parents=True, exist_ok=True)
        atomic.write_text(place / "config", configuration)
        log, before = place / "output.txt", {run.path for run in _runs(place) if run.status().state == "done"}
        before_bytes = log.stat().st_size if log.exists() else 0
        with self._lock:
            process = None if self.stopped_by else _start(place, log, root=root, threads=threads)
            if process is not None:
                self._running.add(process.pid)
        if process is None:
            return ChildRun(run=None, reason="", stopped=True, seconds_cpu=0.0, peak_memory_mb=0.0)
        _, waited, usage = os.wait4(process.pid, 0)
        with self._lock:
            self._running.discard(process.pid)
        process.returncode = status = os.waitstatus_to_exitcode(waited)
        interrupted = status == 128 + signal.SIGINT or -status in _SIGNALS
        if status in (Suspended.exit_code, 128 + signal.SIGINT) and not self.stopped_by:
            self._stop("a signal to one of the runs")
        done = [run for run in _runs(place) if run.path not in before and run.status().state == "done"]
        if self.stopped_by and interrupted and done:
            status = 0  # the signal met it after training, when it was about to end
        reason = _reason(status, log, before_bytes=before_bytes) if status else ""
        if self.stopped_by and status and interrupted:
            reason = "stopped before it could save"
        elif status == Suspended.exit_code:  # without the hint how to resume a single run
            reason = reason.partition(": ")[2].partition(";")[0]
        if not (status or done):
            raise ToolkitError(f"{place} holds no run that has just finished")
        return ChildRun(
            run=None if status else done[0],
            reason=reason,
            stopped=bool(status and self.stopped_by),
            seconds_cpu=round(usage.ru_utime + usage.ru_stime, 2),
            peak_memory_mb=round(usage.ru_maxrss / _KIBIBYTES_PER_MEGABYTE, 1),
        )

    def _handle(self, number: int, _frame: types.FrameType | None) -> None:
        if not self.stopped_by:
            # A terminal sends SIGINT to the children, too, and a second one would end them at once.
            self._stop(signal.Signals(number).name)
            with contextlib.suppress(OSError):  # a stream may be in the middle of a write
                os.write(2, b"\nstopping: runs in progress save and exit; Ctrl-C again kills them\n")
        elif number == signal.SIGINT:
            self._send(signal.SIGKILL)
            raise KeyboardInterrupt

    def _stop(self, why: str) -> None:
        """Start no more processes and terminate the running ones."""
        with self._lock:
            self.stopped_by = self.stopped_by or why
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        with self._lock:
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)


def _start(place: Path, log: Path, *, root: Path, threads: int | None) -> subprocess.Popen[bytes]:
    # The threads of several runs would compete for the same CPUs.
    variables = [f"KCONFIG_CONFIG={place / 'config'}", *([f"OMP_NUM_THREADS={threads}"] if threads else [])]
    command = ["env", "-u", "KCONFIG_MAKE_VARIABLES", *variables]
    command += [sys.executable, "-m", "train", "--runs", str(place), "train"]
    with log.open("ab") as file:
        return subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


def _runs(place: Path) -> list[RunDir]:
    """Return the runs under `place`, newest first, but for those that were renamed."""
    found = (RunDir(path.parent) for path in place.glob("*/*/config") if is_run_name(path.parent.name))
    return sorted(found, key=age, reverse=True)


def _reason(status: int, log: Path, *, before_bytes: int) -> str:
    """Return how a run ended and why, by its output after the `before_bytes` of earlier attempts."""
    how = f"ended by {signal_name(status)}" if status < 0 else f"exit status {status}"
    with log.open("rb") as file:
        file.seek(before_bytes)
        written = file.read().decode("utf-8", errors="replace")
    if error := error_in(written):
        return f"{how}: {error}"
    last = next((line.strip() for line in reversed(written.splitlines()) if line.strip()), "nothing")
    return f"{how} without an error; its last output: {last}"
