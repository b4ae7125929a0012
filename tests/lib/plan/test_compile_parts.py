"""What of a step is compiled, by the plan, with its reasons."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lib.plan.types import Plan
from tests.lib.plan.test_planner import planned

NO_KERNEL, KERNEL = "is compiled: torch has no fused kernel", "without the update: torch has a fused kernel"
UPDATES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "muon"}, f"Muon's update of matrices {NO_KERNEL}"),
    ({"optimizer": "adam_atan2"}, f"Adam-atan2's update {NO_KERNEL}"),
    ({"optimizer": "adamw", "adam_8bit": True}, f"the update of Adam in 8 bits {NO_KERNEL}"),
    ({"optimizer": "adamw", "adam_8bit": False}, KERNEL),
    ({"optimizer": "sgd", "adam_8bit": False}, KERNEL),
]


@pytest.mark.parametrize(("changes", "why"), UPDATES)
def test_an_update_is_compiled_where_torch_has_no_fused_kernel(changes: dict[str, Any], why: str) -> None:
    is_compiled = NO_KERNEL in why
    decided = planned("lenet5", "a10g", **changes)
    assert decided.compile and ("update" in decided.compile_parts) == is_compiled
    assert why in decided.reasons["compile_parts"]


@pytest.mark.parametrize(
    ("apart", "why"),
    [
        ("", "model and loss are one graph"),
        ("the model is compiled by iteration", "without the loss: the model is compiled by iteration;"),
        (None, "without the loss: nothing is known of the task;"),
    ],
)
def test_a_loss_is_in_the_graph_where_the_task_allows_it(apart: str | None, why: str) -> None:
    decided = planned("lenet5", "a10g", facts={"loss_apart": apart})
    assert decided.compile_parts == (("model", "loss") if apart == "" else ("model",))
    assert why in decided.reasons["compile_parts"]


def test_nothing_is_a_part_of_what_is_not_compiled() -> None:
    for machine in ("mi210", "cpu-8g"):
        assert planned("lenet5", machine, optimizer="muon", facts={"loss_apart": ""}).compile_parts == ()


@pytest.mark.parametrize(("machine", "parts"), [("a10g", ("model",)), ("mi210", ())])
def test_a_stored_plan_is_read_with_its_parts_or_those_of_its_version(machine: str, parts: Any) -> None:
    decided = planned("lenet5", machine, facts={"loss_apart": ""})
    stored = json.loads(json.dumps(decided.to_json()))
    assert Plan.from_json(stored).compile_parts == decided.compile_parts
    del stored["compile_parts"], stored["reasons"]["compile_parts"]
    assert Plan.from_json(stored).compile_parts == parts
