"""When `make plan` shows the changes that need less memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.train.planning.test_command import outlook
from train.planning.command import _is_short_of_memory, _lines

HEADING = "Changes that need less memory:"


@pytest.mark.slow
def test_changes_are_shown_where_memory_is_short() -> None:
    found = outlook("h100-80g", 64, optimizer="adamw")
    memory = found.plan.memory
    assert memory is not None and found.alternatives and HEADING not in [*_lines(found)]

    def short(share: float = 0.01, *, method: str = "predicted", **changes: Any) -> bool:
        usable = replace(memory, usable_bytes=round(memory.need_bytes / share))
        decided = replace(found.plan, memory=usable, **changes)
        shown = replace(found, plan=decided, method=method)
        assert (HEADING in [*_lines(shown)]) == _is_short_of_memory(shown)
        return _is_short_of_memory(shown)

    assert short(0.51) and not short(0.49) and short(0.9, method="manual")
    two: dict[str, Any] = {"accumulation": 2, "micro_batch": 32, "last_micro_batch": 32}
    assert short(**two) and not short(method="manual", **two)
    assert not short(device="cpu", **two), "larger micro-batches are no faster on CPUs"
