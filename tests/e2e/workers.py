"""Programs beside the tests, which make what several processes of torch have to make."""

from __future__ import annotations

import os
from pathlib import Path

from tests.e2e.forked import Forked

PATIENCE_SECONDS = 300


def run_worker(name: str, directory: Path, *words: object) -> None:
    """`python -m tests.e2e.NAME DIRECTORY WORDS`, one thread to a process; it has to end with status 0."""
    worker = Forked(
        f"tests.e2e.{name}",
        [str(directory), *map(str, words)],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
        output=directory / "output",
    )
    output, _ = worker.communicate(timeout=PATIENCE_SECONDS)
    assert worker.returncode == 0, output
