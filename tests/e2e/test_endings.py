"""Processes that have talked through gloo end with status 0, one time like the other."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.workers import run_worker

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.long)])
def test_runs_on_two_processes_end_with_status_0(count: int, tmp_path: Path) -> None:
    """Without the end that `launcher.end_process` makes, gloo's threads abort now and then."""
    run_worker("endings_worker", tmp_path, count)
    *runs, aborted = json.loads((tmp_path / "endings").read_text())
    assert runs == [[0, 0]] * count
    assert aborted == [0, -signal.SIGABRT], "one that aborts would have been seen"
