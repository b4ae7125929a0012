"""Preflight of a recursive model: a carry that is lost, or of other rows, is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.runs import checkpoint
from models.trm.model import TinyRecursiveModel
from tests.models.trm.puzzles import puzzle_data, small_trm_config
from tests.support.training import CPU, small_plan
from tests.train.preflight.test_preflight import breaks
from train.preflight import checks as checks
from train.preflight.checks import ROWS, Candidate
from train.tasks.recursive.task import Carry


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    settings = {"optimizer": "adam_atan2", "adam_beta1": 0.9, "adam_beta2": 0.95, "sign_learning_rate": 1e-4}
    config = small_trm_config(**settings, halt_exploration=0.5, warmup_pct=5)
    return Candidate(
        config=config,
        data=puzzle_data(config),
        hardware=CPU,
        plan=small_plan(ROWS),
        root=tmp_path,
        runs=tmp_path / "runs",
    )


@pytest.mark.slow
def test_first_loss(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, told = checks.first_loss(candidate)
    assert passed and "a uniform guess has 1.7951" in told
    breaks(
        monkeypatch,
        TinyRecursiveModel,
        "forward",
        lambda thought: thought._replace(logits=30 * thought.logits),
    )
    assert not checks.first_loss(candidate)[0]


@pytest.mark.slow
def test_accumulation(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.accumulation(candidate)[0]
    seek = Carry.seek
    monkeypatch.setattr(Carry, "seek", lambda self, **place: seek(self, **{**place, "offset": 0}))
    assert not checks.accumulation(candidate)[0]


@pytest.mark.slow
def test_round_trip(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.round_trip(candidate)[0]

    def without(found: Any) -> Any:
        step, state = found
        return step, {**state, "carry": None}

    breaks(monkeypatch, checkpoint, "load", without)
    assert not checks.round_trip(candidate)[0]


@pytest.mark.slow
def test_static_graph(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, told = checks.static_graph(candidate)
    assert passed and told.startswith("one graph of ")

    def looks(thought: Any) -> Any:
        assert thought.halt.sum().item() < 100
        return thought

    breaks(monkeypatch, TinyRecursiveModel, "forward", looks)
    passed, told = checks.static_graph(candidate)
    assert not passed and "asks the host" in told
