"""`make preflight` where a check fails, and JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runner import TINY, Runner

pytestmark = pytest.mark.slow


def test_a_failed_check_fails_the_command_and_a_program_can_read_the_others(tmp_path: Path) -> None:
    """That all of them pass on a sound configuration, and in words, is a command of the README."""
    runner = Runner(tmp_path, forks=True)
    runner.configure("lenet5", TINY)
    (tmp_path / "runs").write_text("a file where runs should be")
    found = json.loads(runner.run("preflight", "--json", status=1))
    assert len(found) == 12 and all(check["told"] for check in found)
    assert [check["name"] for check in found if not check["passed"]] == ["storage"]
