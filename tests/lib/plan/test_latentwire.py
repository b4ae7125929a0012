"""LatentWire's policy: its table as it was computed, and its defects, which are not there any more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lib.errors import PlanError
from lib.plan import plan
from lib.plan.gpus import parse_gpu
from lib.plan.latentwire import Models, document_batch, document_facts
from lib.plan.types import ModelFacts, Plan
from lib.units import GB
from tests.support.configs import make_config, make_facts

GPUS = {
    "A100-40": ("NVIDIA A100-SXM4-40GB", 40),
    "A100-80": ("NVIDIA A100-SXM4-80GB", 80),
    "H100": ("NVIDIA H100 80GB HBM3", 80),
    "H200": ("NVIDIA H200", 141),
    "4090": ("NVIDIA GeForce RTX 4090", 24),
}
COUNTS = (1, 2, 3, 4, 8, 16)

# What the class that the policy comes from computes when it is run, both models and Llama alone.
DOCUMENT = {
    "A100-40": ((1, 4, 22, 44, 248, 496), (16, 21, 30, 60, 280, 560)),
    "A100-80": ((38, 44, 62, 124, 512, 1024), (56, 61, 64, 128, 512, 1024)),
    "H100": ((38, 128, 62, 256, 512, 1024), (56, 128, 64, 256, 512, 1024)),
    "H200": ((64, 64, 64, 128, 512, 1024), (64, 64, 64, 128, 512, 1024)),
    "4090": ((1, -12, 6, 12, 120, 240), (1, 5, 14, 28, 152, 304)),
}

# (strategy, branch devices, processes, micro-batch) of the two models, None where not one sample fits. The
# catalogue's cards have what their drivers report, 75 % of which is 31.8, 63.9, 63.6, 113.0 and 19.0 GB.
PLANNED: dict[str, tuple[tuple[str, tuple[int, ...], int, int] | None, ...]] = {
    "a100-40g": (
        None, ("split", (1, 1), 1, 16), ("split", (2, 1), 1, 16), ("split", (2, 2), 1, 32),
        ("ddp", (), 8, 4), ("ddp", (), 16, 4),
    ),
    "h100-80g": (
        ("single", (), 1, 32), ("ddp", (), 2, 32), ("split", (2, 1), 1, 64), ("ddp", (), 4, 16),
        ("ddp", (), 8, 8), ("ddp", (), 16, 4),
    ),
    "rtx4090": (
        None, ("split", (1, 1), 1, 4), ("split", (2, 1), 1, 4), ("split", (2, 2), 1, 8), None, None,
    ),
}  # fmt: skip


def gpus(key: str, count: int) -> dict[str, object]:
    name, gigabytes = GPUS[key]
    return {"gpu_name": name, "total_bytes": [gigabytes * GB] * count}


@pytest.mark.parametrize("key", GPUS)
@pytest.mark.parametrize(("models", "column"), [("both", 0), ("llama", 1)])
def test_the_rules_compute_what_they_computed(key: str, models: Models, column: int) -> None:
    found = tuple(document_batch(**gpus(key, count), models=models) for count in COUNTS)  # type: ignore[arg-type]
    assert found == DOCUMENT[key][column]


POLICY: dict[str, Any] = {
    "elastic_policy": "latentwire", "elastic_base_batch": 64, "elastic_target_util": 75,
    "auto_method": "predict", "channels_last": False,
}  # fmt: skip


# Two models by the rules, with the layouts that train


def decide_two(machine: str, facts: ModelFacts | None = None, **changes: Any) -> Plan:
    config = make_config("lenet5", **POLICY | changes)
    return plan(config, parse_gpu(machine), facts or document_facts())


@pytest.mark.parametrize("machine", PLANNED)
@pytest.mark.parametrize("count", COUNTS)
def test_the_two_models_have_the_layouts_of_the_document(machine: str, count: int) -> None:
    expected = PLANNED[machine][COUNTS.index(count)]
    named = machine if count == 1 else f"{machine}x{count}"
    if expected is None:
        with pytest.raises(PlanError, match=r"27.00 GB of frozen models .* leaves room for (0|-\d+),"):
            decide_two(named)
        return
    found = decide_two(named)
    assert (found.strategy, found.branch_devices, found.world, found.micro_batch) == expected
    assert found.layout.devices == count and found.effective_batch == 64 == sum(found.shares)


def test_what_is_frozen_is_counted_as_it_is() -> None:
    """In the precision of the run, and whole on each device that has it."""
    before = decide_two("a100-40gx2").reasons["micro_batch"]
    assert "14.00 GB of frozen models and the weights leaves room for 23," in before
    wide = decide_two("h100-80gx2", precision="fp32").reasons["micro_batch"]
    assert "54.00 GB of frozen models and the weights leaves room for 12," in wide
    facts = document_facts()
    assert facts.branches is not None
    first, second = facts.branches
    heavier = dataclasses.replace(facts, branches=(dataclasses.replace(first, bytes_per_sample=GB), second))
    assert "leaves room for 10," in decide_two("a100-40gx2", heavier).reasons["micro_batch"]


def test_growth_of_two_models_is_by_their_copies() -> None:
    assert decide_two("h100-80gx4", elastic_scale_batch=True).effective_batch == 256
    assert decide_two("a100-40gx4", elastic_scale_batch=True).effective_batch == 128
    assert decide_two("a100-40gx3", elastic_scale_batch=True).effective_batch == 64


def test_a_processor_has_replicas() -> None:
    found = plan(make_config("lenet5", **POLICY, num_devices=2), parse_gpu("cpu-512g"), document_facts())
    assert (found.strategy, found.world) == ("ddp", 2)
    assert found.reasons["strategy"] == "LatentWire's policy: model_split, on a cpu as replicas"


def test_several_nodes_have_no_split() -> None:
    with pytest.raises(PlanError, match="several nodes need a process for each device"):
        decide_two("a100-40gx2", dist_nnodes="2")


# One model of this toolkit by the same rules


def decide(machine: str, *, facts: dict[str, Any] | None = None, **changes: Any) -> Plan:
    known = {"parameters": 10**9, "bytes_per_sample": GB} | (facts or {})
    return plan(
        make_config("lenet5", **POLICY | changes), parse_gpu(machine), make_facts("lenet5", **known),
        predict=lambda _: {"parameters": 4 * GB},
    )  # fmt: skip


def test_one_model_is_copied_and_its_effective_batch_does_not_depend_on_the_gpus() -> None:
    plans = [decide(f"a100-40gx{count}") for count in (1, 2, 4, 8)]
    assert [each.effective_batch for each in plans] == [64] * 4
    # 75 % of 42.3 GB less 4 GB of weights, and less 4 GB on one GPU alone: 23 and 27 samples
    assert [each.micro_batch for each in plans] == [16, 16, 16, 8]
    assert [each.strategy for each in plans] == ["single", "ddp", "ddp", "ddp"]
    assert (
        "75 % of 42.3 GB less 4 GB and the weights leaves room for 23, at most 64"
        in plans[0].reasons["micro_batch"]
    )
    assert plans[0].reasons["target"] == "CONFIG_ELASTIC_BASE_BATCH"
    assert decide("a100-40gx2", target_effective_batch=32).effective_batch == 32


def test_growth_is_asked_for_by_name() -> None:
    grown = decide("a100-40gx4", elastic_scale_batch=True)
    assert grown.effective_batch == 256 and "GROWS with the devices" in grown.reasons["target"]


def test_the_policy_refuses_what_it_has_no_batch_for() -> None:
    with pytest.raises(PlanError, match="LatentWire's policy has no batch here"):
        decide("rtx4090", facts={"parameters": 6 * 10**9})
    with pytest.raises(PlanError, match="needs the size of the model"):
        decide("rtx4090", facts={"bytes_per_sample": None})
    with pytest.raises(PlanError, match="each of 3 devices needs at least a sample"):
        decide("a100-40gx3", target_effective_batch=2)


def test_the_planner_is_the_default() -> None:
    assert make_config("lenet5").elastic_policy == "planner"
