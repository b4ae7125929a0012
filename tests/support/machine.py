"""Bars of speed are told for one machine; another one, or a busy one, is given its due."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

# `python -m tests.support.machine` on the machine of docs/benchmarks, which did nothing else.
PARSING_SECONDS, KNOWN_SECONDS = 0.016, 0.081
PARSE = "import argparse, ast, inspect\nfor _ in range(3): ast.parse(inspect.getsource(argparse))"
KNOWN = [sys.executable, "-c", PARSE]


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


def processor_seconds(command: list[str], *, cwd: Path, bar: float, repeats: int = 8) -> tuple[float, int]:
    """User and system time of a program on the machine of the bars, and its exit status.

    The fastest of a few calls. One that takes more than `bar` seconds has as much taken off as a known
    program takes longer right after it: the caches may be other programs' now, and the cores half of cores.
    """
    fastest, status = math.inf, 0
    for _ in range(repeats):
        seconds, status = _of_child(command, cwd)
        if seconds > bar:
            seconds /= max(1.0, _of_child(KNOWN, cwd)[0] / KNOWN_SECONDS)
        fastest = min(fastest, seconds)
        if fastest <= bar:
            break
    return fastest, status


def _of_child(command: list[str], cwd: Path) -> tuple[float, int]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=cwd, capture_output=True, stdin=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.returncode


if __name__ == "__main__":
    print(f"{parsing_seconds():.4f} {min(_of_child(KNOWN, Path.cwd())[0] for _ in range(7)):.3f}")
