"""Which plan a run resumes with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lib.plan.gpus import parse_gpu
from lib.runs import index
from tests.support.tokens import small_lm_config
from tests.support.training import small_plan
from train.planning.run_plan import _stored_plan


@pytest.mark.parametrize(
    ("requested", "is_kept"),
    [
        ({}, True),
        ({"dist_strategy": "pipeline", "dist_stages": 0}, True),
        ({"dist_strategy": "pipeline", "dist_stages": 4}, True),
        ({"dist_strategy": "pipeline", "dist_stages": 2}, False),
        ({"dist_strategy": "ddp"}, False),
    ],
)
def test_the_stored_plan_is_kept_unless_another_layout_is_requested(
    requested: dict[str, Any], is_kept: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = parse_gpu("a100-40gx4")
    stored = {
        "hardware": machine,
        "plan": small_plan(4, 4, world=4, strategy="pipeline", shard=4, effective_batch=8),
    }
    monkeypatch.setattr(index, "stored", lambda _, name, __: stored[name])
    request = SimpleNamespace(config=small_lm_config().replace(**requested))
    found = _stored_plan(cast(Any, SimpleNamespace(path=tmp_path)), cast(Any, request), machine)
    assert found == (stored["plan"] if is_kept else None)
