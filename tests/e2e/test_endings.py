"""Processes that have talked through gloo end with status 0, one time like the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("endings_worker.py")
RUNS = 20


def test_runs_on_two_processes_end_with_status_0() -> None:
    """Without the end that `lib.launcher.end_process` makes, gloo's threads abort now and then."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(RUNS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *runs, aborted = json.loads(done.stdout)
    assert runs == [[0, 0]] * RUNS, done.stderr
    assert aborted == [0, -signal.SIGABRT], "one that aborts would have been seen"
