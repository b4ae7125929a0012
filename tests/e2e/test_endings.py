"""Processes that have talked through gloo end with status 0, one time like the other."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.workers import run_worker

pytestmark = pytest.mark.slow

RUNS = 20


def test_runs_on_two_processes_end_with_status_0(tmp_path: Path) -> None:
    """Without the end that `launcher.end_process` makes, gloo's threads abort now and then."""
    run_worker("endings_worker", tmp_path, RUNS)
    *runs, aborted = json.loads((tmp_path / "endings").read_text())
    assert runs == [[0, 0]] * RUNS
    assert aborted == [0, -signal.SIGABRT], "one that aborts would have been seen"
