"""Run every test of a fault several times and count how often it passed: a flaky one shows as such."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lib.errors import run_main

ROOT = Path(__file__).resolve().parents[1]
TIMES = 5
TESTS = (
    "tests/e2e/test_faults.py::test_a_killed_process_costs_less_than_a_checkpoint_interval",
    "tests/e2e/test_machines.py::test_a_machine_joins_and_dies_and_every_step_is_made_once",
    "tests/e2e/test_launcher.py::test_a_signal_saves_and_ends_with_its_own_status",
    "tests/e2e/test_launcher.py::test_a_worker_that_is_killed_is_named",
    "tests/e2e/test_launcher.py::test_nothing_outlives_a_killed_supervisor",
)


def main() -> int:
    """Exit status 1 where a test failed at least once; the output of each failure is shown."""
    all_passed = True
    for test in TESTS:
        passed = sum(_passes(test) for _ in range(TIMES))
        print(f"{passed} of {TIMES}  {test}", flush=True)
        all_passed = all_passed and passed == TIMES
    return 0 if all_passed else 1


def _passes(test: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", test], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(run_main(main))
