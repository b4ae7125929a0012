"""`python -m train` whose standard output is a pipe that nobody reads: `tests.e2e.unheard WORDS`."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    runpy.run_module("train", run_name="__main__", alter_sys=True)
