"""`make preflight` on a sound configuration: all eleven checks, and JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runner import TINY, Runner

pytestmark = pytest.mark.slow


def test_all_checks_pass_and_a_program_can_read_them(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", TINY)
    found = json.loads(runner.run("preflight", "--json"))
    assert [check["name"] for check in found if not check["passed"]] == []
    assert len(found) == 11 and all(check["told"] for check in found)


def test_a_failed_check_is_told_and_fails_the_command(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    runner.configure("lenet5", TINY)
    (tmp_path / "runs").write_text("a file where runs should be")
    output = runner.run("preflight", status=1)
    assert "FAILED storage" in output and output.count("\nok ") >= 9
