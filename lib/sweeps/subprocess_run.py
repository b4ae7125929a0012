"""Training runs in processes of their own, as parts of a sweep: what each cost, and how it ended."""

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
from lib.errors import Suspended, ToolkitError, told_in
from lib.kconf import Resolved
from lib.runs.directory import RunDir
from lib.runs.identity import trains

_KIBIBYTES_PER_MEGABYTE = 1e6 / 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Item = TypeVar("Item")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRun:
    """run: the run directory; None where training did not come to its end, which `reason` tells.

    stopped: a signal asked for that; trained again, it goes on.
    """

    run: RunDir | None
    reason: str
    stopped: bool
    seconds_cpu: float
    peak_memory_mb: float


def left_over(place: Path, resolved: Resolved) -> RunDir | None:
    """The run of `resolved` under `place` that is done, though nobody was there to take its result.

    Raises ToolkitError where a process trains there that outlived the one that started it.
    """
    for run in _runs(place):
        run.lock()
        run.release()
        if trains(run, resolved) and run.status().state == "done":
            return run
    return None


class Children:
    """Processes that train at the same time, while entered; no two at one place.

    The first SIGTERM or SIGINT is passed on to them as SIGTERM: they save and end, and none is begun after
    it. So it is where one of them was told to stop by somebody else. A SIGINT after that kills what is left,
    and is raised.
    """

    def __init__(self) -> None:
        self.stopped_by = ""  # the name of the signal, or what else stopped all
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

    def each(self, function: Callable[[Item], Found], items: Iterable[Item], *, workers: int) -> list[Found]:
        """What `function`, which may call `train`, returns for each of `items`; `workers` at a time."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, items))

    def check(self, *, todo: str) -> None:
        """Raise Suspended where the children were stopped."""
        if self.stopped_by:
            raise Suspended(f"stopped by {self.stopped_by}", todo=todo)

    def train(self, place: Path, configuration: str, *, root: Path) -> ChildRun:
        """Train `configuration` (assignments) under `place`; goes on with what was interrupted there.

        root: the source tree. To be called by `each`. Raises ToolkitError where a run says that it went well
        and left nothing.
        """
        place.mkdir(parents=True, exist_ok=True)
        atomic.write_text(place / "config", configuration)
        log = place / "output.txt"
        before_bytes = log.stat().st_size if log.exists() else 0
        with self._lock:
            process = None if self.stopped_by else _started(place, log, root=root)
            if process is not None:
                self._running.add(process.pid)
        if process is None:
            return ChildRun(run=None, reason="", stopped=True, seconds_cpu=0.0, peak_memory_mb=0.0)
        _, waited, usage = os.wait4(process.pid, 0)
        with self._lock:
            self._running.discard(process.pid)
        process.returncode = status = os.waitstatus_to_exitcode(waited)
        if status == Suspended.exit_code and not self.stopped_by:
            self._stop("a signal to one of the runs")
        reason = _reason(status, log, before_bytes=before_bytes) if status else ""
        if status == Suspended.exit_code:
            reason = reason.partition(": ")[2].partition(";")[0]  # how a lone run goes on is not for a sweep
        return ChildRun(
            run=None if status else _done(place),
            reason=reason,
            stopped=bool(status and self.stopped_by),
            seconds_cpu=round(usage.ru_utime + usage.ru_stime, 2),
            peak_memory_mb=round(usage.ru_maxrss / _KIBIBYTES_PER_MEGABYTE, 1),
        )

    def _handle(self, number: int, _frame: types.FrameType | None) -> None:
        if not self.stopped_by:
            # A terminal sends SIGINT to the children, too: to get it twice would end them at once.
            count = self._stop(signal.Signals(number).name)
            with contextlib.suppress(OSError):  # a stream may be in the middle of a write
                os.write(2, b"\nstopping: %d run(s) save and end; SIGINT ends at once\n" % count)
        elif number == signal.SIGINT:
            self._send(signal.SIGKILL)
            raise KeyboardInterrupt

    def _stop(self, why: str) -> int:
        """Begin nothing more and have what is running end; how many that are."""
        with self._lock:
            self.stopped_by = self.stopped_by or why
        return self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> int:
        with self._lock:
            for pid in self._running:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
            return len(self._running)


def _started(place: Path, log: Path, *, root: Path) -> subprocess.Popen[bytes]:
    # One thread each: several threads of several runs would wait for each other.
    variables = f"KCONFIG_CONFIG={place / 'config'}", "OMP_NUM_THREADS=1"
    command = ["env", "-u", "KCONFIG_MAKE_VARIABLES", *variables]
    command += [sys.executable, "-m", "train", "--runs", str(place), "train"]
    with log.open("ab") as opened:
        return subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=opened, stderr=subprocess.STDOUT
        )


def _runs(place: Path) -> list[RunDir]:
    return [RunDir.open(path.parent) for path in sorted(place.glob("*/*/config"))]


def _done(place: Path) -> RunDir:
    done = [run for run in _runs(place) if run.status().state == "done"]
    if not done:
        raise ToolkitError(f"{place} holds no run that is done")
    return done[0]


def _reason(status: int, log: Path, *, before_bytes: int) -> str:
    """How a run ended and why, by what it has written beyond `before_bytes`, where those before it ended."""
    how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
    with log.open("rb") as opened:
        opened.seek(before_bytes)
        written = opened.read().decode("utf-8", errors="replace")
    if error := told_in(written):
        return f"{how}: {error}"
    last = next((line.strip() for line in reversed(written.splitlines()) if line.strip()), "nothing")
    return f"{how} without an error; the last that it wrote is: {last}"
