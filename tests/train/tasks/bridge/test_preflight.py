"""Preflight of two frozen models, which alone can tell what the first loss is to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.latentwire.answers import answers_data, small_bridge_config
from tests.support.training import CPU, small_plan
from train.preflight import checks as checks
from train.preflight.checks import ROWS, Candidate


@pytest.mark.slow
def test_any_first_loss_that_is_a_number_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_bridge_config()
    candidate = Candidate(
        config=config,
        data=answers_data(config),
        hardware=CPU,
        plan=small_plan(ROWS),
        root=tmp_path,
        runs=tmp_path / "runs",
    )
    passed, told = checks.first_loss(candidate)
    assert passed and told.endswith("; the task cannot predict it")
    monkeypatch.setattr(checks, "_losses", lambda *_: iter([float("nan")]))
    assert not checks.first_loss(candidate)[0]
