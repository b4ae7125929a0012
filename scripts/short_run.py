"""A run of a few steps in a folder of its own, as make train makes it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib import kconf
from lib.errors import ToolkitError
from lib.runs import metrics
from lib.runs.directory import RunDir, resolve_run

ROOT = Path(__file__).resolve().parents[1]
TRAIN = (sys.executable, "-m", "train")
_GRACE_SECONDS = 10.0  # for a checkpoint, after SIGTERM


def short_run(
    defconfig: str, settings: Mapping[str, str], *, folder: Path, seconds: float | None = None
) -> RunDir:
    """Train the shipped configuration `defconfig` with `settings` in `folder`; return the run.

    Raises ToolkitError where it fails, or takes longer than `seconds`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = ROOT / "defconfigs" / defconfig
    (folder / ".config").write_text(kconf.load(root=ROOT, config_file=file, overrides=settings).text)
    process = subprocess.Popen(
        ["env", f"KCONFIG_CONFIG={folder / '.config'}", *TRAIN, "--runs", str(folder / "runs"), "train"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        raise ToolkitError(f"training {defconfig} was stopped after {seconds:g} s") from None
    if process.returncode:
        last = (errors.strip().splitlines() or ["no message"])[-1].removeprefix("error: ")
        raise ToolkitError(f"training {defconfig} failed", why=last)
    return resolve_run(folder / "runs")


def rows_of(run: RunDir, kind: str) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of that kind."""
    return [row for row in metrics.read(run.metrics) if row["kind"] == kind]


def _end(process: subprocess.Popen[str]) -> None:
    """End a run by SIGTERM, which its processes hear of, and by SIGKILL; none of them outlives the first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return
