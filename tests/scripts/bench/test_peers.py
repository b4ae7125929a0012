"""make bench PEERS=1: a row for each program, and nothing where they cannot be installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import ToolkitError
from scripts.bench import peers


def answer(command: list[Any], *, installs: int = 0, measures: int = 0) -> SimpleNamespace:
    """The result of a process: of the script that installs, or of one that measures."""
    if str(command[0]).endswith("extra_environment.sh"):
        return SimpleNamespace(returncode=installs)
    found: dict[str, Any] = {"unit": "2 threads", "seconds": {"ours": [1.0, 1.0], "Lightning": [2.0, 2.5]}}
    if "--only" in command:
        found = {"first_step_at": 1e12, "peak_bytes": 10**9, "lines": 17}
    return SimpleNamespace(returncode=measures, stdout=f"noise\n{json.dumps(found)}\n", stderr="no such case")


def test_every_case_has_a_table_and_the_file_has_all_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer(command))
    out = tmp_path / "peers.json"
    assert peers.compare_all([], out=out) == 0
    printed, figures = capsys.readouterr().out, json.loads(out.read_text())
    for case in peers.CASES:
        for precision in peers.PRECISIONS:
            assert f"{case}, {precision}, 2 threads" in printed
        assert [row["program"] for row in figures if row["case"] == case and "program" in row] == [
            "ours",
            "Lightning",
        ]
    assert "0.500" in printed and "17" in printed
    assert {"load", "seconds", "unit"} <= figures[0].keys()


def test_nothing_is_compared_where_nothing_can_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer(command, installs=1))
    assert peers.compare_all([], out=None) == 0
    assert capsys.readouterr().out == f"{peers.NOT_INSTALLED}\n"


def test_a_case_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: answer(command, measures=1))
    with pytest.raises(ToolkitError, match="--case lenet5 fp32 failed: no such case"):
        peers.compare_all([], out=None)
