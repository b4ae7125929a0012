"""One training run in a process of its own, as a part of a sweep: what it cost, and how it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lib import atomic
from lib.errors import ToolkitError
from lib.rundir import RunDir

_KIBIBYTES_PER_MEGABYTE = 1e6 / 1024
_LAST_LINES = 2  # of a failed run, in its reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRun:
    """run: the run directory; None where training failed, which `reason` tells."""

    run: RunDir | None
    reason: str
    seconds_cpu: float
    peak_memory_mb: float


def train_apart(place: Path, configuration: str, *, root: Path) -> ChildRun:
    """Train `configuration` (assignments) under `place`; goes on with what was interrupted there.

    root: the source tree. Raises ToolkitError where a run says that it went well and left nothing.
    """
    place.mkdir(parents=True, exist_ok=True)
    atomic.write_text(place / "config", configuration)
    log = place / "output.txt"
    # One thread each: several threads of several runs would wait for each other.
    command = [
        "env",
        "-u",
        "KCONFIG_MAKE_VARIABLES",
        f"KCONFIG_CONFIG={place / 'config'}",
        "OMP_NUM_THREADS=1",
    ]
    command += [sys.executable, "-m", "train", "--runs", str(place), "train"]
    with log.open("ab") as opened:
        process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=opened, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    cost = {
        "seconds_cpu": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_memory_mb": round(usage.ru_maxrss / _KIBIBYTES_PER_MEGABYTE, 1),
    }
    if process.returncode:
        return ChildRun(run=None, reason=f"exit status {process.returncode}: {_tail(log)}", **cost)
    return ChildRun(run=_done(place), reason="", **cost)


def _done(place: Path) -> RunDir:
    runs = [RunDir.open(path.parent) for path in place.glob("*/*/config")]
    done = [run for run in runs if run.status().state == "done"]
    if not done:
        raise ToolkitError(f"{place} holds no run that is done")
    return done[0]


def _tail(log: Path) -> str:
    """The error, and the line before it, where a configuration says which of it is at fault."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " / ".join(line.strip() for line in lines[-_LAST_LINES:])
