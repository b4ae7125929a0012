"""Programs beside the tests, which make what several processes of torch have to make."""

from __future__ import annotations

import os
import subprocess
import sys

PATIENCE_SECONDS = 300


def run_worker(*words: object, **environment: str) -> str:
    """What `python WORDS` prints, one thread for each process; it has to end with status 0."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
