"""Run each fault test several times and count how often it passes, to find flaky ones."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from lib.errors import run_main

ROOT = Path(__file__).resolve().parents[1]
# Test -> number of runs. Each is also one of `make test`.
TESTS = {
    "tests/e2e/test_faults.py::test_a_killed_process_costs_less_than_a_checkpoint_interval": 5,
    "tests/e2e/test_machines.py::test_a_machine_joins_and_dies_and_every_step_is_made_once": 5,
    "tests/e2e/test_launcher.py::test_a_signal_saves_and_ends_with_its_own_status": 5,
    "tests/e2e/test_launcher.py::test_a_worker_that_is_killed_is_named": 5,
    "tests/e2e/test_launcher.py::test_nothing_outlives_a_killed_supervisor": 5,
    "tests/e2e/test_two_processes.py::test_an_interrupted_run_on_two_processes_ends_in_the_same_bits": 5,
    # Not a fault, but processes that used gloo can abort at the end of a run.
    "tests/e2e/test_train.py::test_a_run_on_two_processes_is_the_run_on_one": 20,
}


def main() -> int:
    """Return 1 if a test failed at least once; print the output of each failure."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    failures = 0
    for test, times in TESTS.items():
        passed = sum(_passes(test) for _ in range(times))
        print(f"{passed} of {times}  {test}", flush=True)
        failures += times - passed
    return int(failures > 0)


def _passes(test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-m", "not slurm", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = done.returncode == 0 and was_run(done.stdout)
    if not passed:
        print(done.stdout, file=sys.stderr)
    return passed


def was_run(output: str) -> bool:
    """Return True if no test was skipped, which pytest reports as success, too."""
    last = output.splitlines()[-1] if output else ""
    return bool(re.search(r"\b[1-9]\d* passed\b", last)) and "skipped" not in last


if __name__ == "__main__":
    sys.exit(run_main(main))
