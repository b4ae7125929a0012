"""What of a step is compiled, by the plan, with its reasons."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lib.plan.show import compact_text, named_decisions
from lib.plan.types import ITERATED, Plan, Weight
from tests.lib.plan.test_planner import planned

NO_KERNEL, KERNEL = "is compiled: torch has no fused kernel", "without the update: torch has a fused kernel"
GRAPHS: dict[str, Any] = {"cuda_graphs": True, "target_effective_batch": 64}
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


ROOT, SMALL, LARGE = ((Weight((size,), True),) for size in (64, 32, 128))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (
            {"units": (ROOT, SMALL, LARGE, SMALL), "loss_apart": ""},
            "CONFIG_COMPILE_BLOCKS=y: 3 blocks of 2 kinds, equal ones once",
        ),
        ({"units": (ROOT, SMALL), "loss_apart": ""}, "has no effect: the model has no equal blocks"),
        ({"units": (ROOT, SMALL, LARGE), "loss_apart": ""}, "has no effect: the model has no equal blocks"),
        ({"units": None, "loss_apart": ""}, "has no effect: the model has no equal blocks"),
        (
            {"units": (ROOT, SMALL, SMALL), "loss_apart": ITERATED},
            "has no effect: the model is compiled by iteration",
        ),
    ],
)
def test_blocks_are_compiled_on_request_where_there_are_some(facts: dict[str, Any], why: str) -> None:
    decided = planned("lenet5", "a10g", facts=facts, compile_blocks=True, optimizer="muon")
    by_block = why.startswith("CONFIG")
    in_graph = ("loss",) if facts["loss_apart"] == "" else ()
    assert decided.compile_parts == (("blocks",) if by_block else ("model", *in_graph)) + ("update",)
    assert why in decided.reasons["compile_parts"]
    assert ("without the loss" in decided.reasons["compile_parts"]) == (facts["loss_apart"] == ITERATED)
    whole = planned("lenet5", "a10g", facts=facts, optimizer="muon")
    assert "blocks" not in whole.compile_parts and "BLOCKS" not in whole.reasons["compile_parts"]


@pytest.mark.parametrize("machine", ["mi210", "cpu-8g"])
def test_blocks_of_what_is_not_compiled_are_noted(machine: str) -> None:
    decided = planned("lenet5", machine, compile_blocks=True)
    assert not decided.compile_parts
    assert (
        decided.reasons["compile_parts"] == "NOTE: CONFIG_COMPILE_BLOCKS=y has no effect: nothing is compiled"
    )
    assert ("compile parts", "none", decided.reasons["compile_parts"]) in named_decisions(decided)
    assert "has no effect: nothing is compiled" in compact_text(decided, columns=200)


@pytest.mark.parametrize(("machine", "parts"), [("a10g", ("model",)), ("mi210", ())])
def test_a_stored_plan_is_read_with_its_parts_or_those_of_its_version(machine: str, parts: Any) -> None:
    decided = planned("lenet5", machine, facts={"loss_apart": ""})
    stored = json.loads(json.dumps(decided.to_json()))
    assert Plan.from_json(stored).compile_parts == decided.compile_parts
    del stored["compile_parts"], stored["reasons"]["compile_parts"]
    assert Plan.from_json(stored).compile_parts == parts


@pytest.mark.parametrize(
    ("machine", "changes", "why"),
    [
        ("a10g", {}, "set by hand; EXPERIMENTAL"),
        ("a10g", {"cuda_graphs": False}, "CONFIG_CUDA_GRAPHS=n"),
        (
            "cpu-8g",
            {"compile": "manual", "compile_model": True},
            "NOTE: CONFIG_CUDA_GRAPHS=y has no effect: they are for NVIDIA GPUs only",
        ),
        ("w7900", {"compile": "manual", "compile_model": True}, "no effect: they are for NVIDIA GPUs only"),
        ("a10g", {"compile": "manual", "compile_model": False}, "no effect: nothing is compiled"),
        ("h100-80g-70g-free-x4", {}, "no effect: gradients are averaged over devices"),
        ("a10g", {"activation_offload": True}, "no effect: activations are offloaded"),
        (
            "a10g",
            {"hyper_param": "manual", "batch_size": 8, "gradient_accumulation": 8},
            "no effect: gradients are accumulated over micro-batches",
        ),
    ],
)
def test_cuda_graphs_are_for_one_micro_batch_on_one_gpu(
    machine: str, changes: dict[str, Any], why: str
) -> None:
    decided = planned("lenet5", machine, facts={"loss_apart": ""}, **{**GRAPHS, **changes})
    assert decided.cuda_graphs == why.startswith("set by hand") and why in decided.reasons["cuda_graphs"]


def test_cuda_graphs_need_the_loss_and_no_random_layers() -> None:
    for facts, why in (
        ({"loss_apart": "it keeps state"}, "the loss is not compiled with the model"),
        ({"loss_apart": "", "inexact": ("drop.0",)}, "random numbers may be drawn by drop.0"),
    ):
        decided = planned("lenet5", "a10g", facts=facts, **GRAPHS)
        assert not decided.cuda_graphs and why in decided.reasons["cuda_graphs"]


def test_a_plan_with_graphs_that_cannot_be_is_refused_and_an_earlier_one_has_none() -> None:
    decided = planned("lenet5", "a10g", facts={"loss_apart": ""}, **GRAPHS)
    assert decided.cuda_graphs
    for changes in ({"compile_parts": ("model",)}, {"compile": False, "compile_parts": ()}):
        with pytest.raises(ValueError, match="CUDA graphs need one micro-batch on one device"):
            dataclasses.replace(decided, **changes)
    with pytest.raises(ValueError, match="CUDA graphs need one micro-batch on one device"):
        dataclasses.replace(decided, accumulation=2, effective_batch=2 * decided.effective_batch)
    stored = json.loads(json.dumps(decided.to_json()))
    assert Plan.from_json(stored).cuda_graphs
    del stored["cuda_graphs"], stored["reasons"]["cuda_graphs"]
    assert not Plan.from_json(stored).cuda_graphs
