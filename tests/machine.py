"""Bars of speed are told for one machine; another one, or a busy one, is given its due."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import resource
import subprocess
import time
from pathlib import Path

# `python -m tests.machine` on the machine of docs/benchmarks, which did nothing else.
PARSING_SECONDS = 0.016


def slowness() -> float:
    """How many times longer Python works now than on the machine of the bars, 1 at the least."""
    return max(1.0, parsing_seconds() / PARSING_SECONDS)


def parsing_seconds() -> float:
    """Processor time of a fixed piece of work: the fastest of a few."""
    text = inspect.getsource(argparse)
    taken = []
    for _ in range(7):
        began = time.process_time()
        ast.parse(text)
        taken.append(time.process_time() - began)
    return min(taken)


def processor_seconds(command: list[str], *, cwd: Path, bar: float, repeats: int = 4) -> tuple[float, int]:
    """User and system time of the fastest of a few calls of a program, and its exit status.

    bar: seconds at which a call is fast enough to be the last one.
    """
    seconds = [math.inf]
    while len(seconds) <= repeats and min(seconds) > bar:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=cwd, capture_output=True, stdin=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(seconds), done.returncode


if __name__ == "__main__":
    print(f"{parsing_seconds():.4f}")
