"""LatentWire's policy: its table as it was computed, and its defects, which are not there any more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import PlanError
from lib.plan import plan
from lib.plan.gpus import parse_gpu
from lib.plan.latentwire import Models, document_batch, latentwire
from lib.plan.types import Plan
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

# (strategy, copies, samples at once of a copy); None where not one sample fits.
GOLDEN: dict[str, tuple[tuple[str, int, int] | None, ...]] = {
    "A100-40": (
        ("single_gpu", 1, 1), ("model_split", 1, 4), ("hybrid_3gpu", 1, 22), ("hybrid_4gpu", 2, 22),
        ("ddp_8gpu", 8, 31), ("ddp_16gpu", 16, 31),
    ),
    "A100-80": (
        ("single_gpu", 1, 38), ("model_split", 1, 44), ("hybrid_3gpu", 1, 62), ("hybrid_4gpu", 2, 62),
        ("ddp_8gpu", 8, 64), ("ddp_16gpu", 16, 64),
    ),
    "H100": (
        ("single_gpu", 1, 38), ("ddp", 2, 44), ("hybrid_3gpu", 1, 62), ("ddp_4gpu", 4, 44),
        ("ddp_8gpu", 8, 64), ("ddp_16gpu", 16, 64),
    ),
    "H200": (
        ("single_gpu", 1, 64), ("model_split", 1, 64), ("hybrid_3gpu", 1, 64), ("hybrid_4gpu", 2, 64),
        ("ddp_8gpu", 8, 64), ("ddp_16gpu", 16, 64),
    ),
    "4090": (
        ("single_gpu", 1, 1), None, ("hybrid_3gpu", 1, 6), ("hybrid_4gpu", 2, 6),
        ("ddp_8gpu", 8, 15), ("ddp_16gpu", 16, 15),
    ),
}  # fmt: skip

LAYOUTS = {
    "single_gpu": ((0,), (0,)),
    "model_split": ((0,), (1,)),
    "ddp": ((0, 1), (0, 1)),
    "hybrid_3gpu": ((0, 1), (2,)),
    "hybrid_4gpu": ((0, 1), (2, 3)),
    "ddp_4gpu": ((0, 1, 2, 3), (0, 1, 2, 3)),
}


def gpus(key: str, count: int) -> dict[str, object]:
    name, gigabytes = GPUS[key]
    return {"gpu_name": name, "total_bytes": [gigabytes * GB] * count}


@pytest.mark.parametrize("key", GPUS)
@pytest.mark.parametrize(("models", "column"), [("both", 0), ("llama", 1)])
def test_the_rules_compute_what_they_computed(key: str, models: Models, column: int) -> None:
    found = tuple(document_batch(**gpus(key, count), models=models) for count in COUNTS)  # type: ignore[arg-type]
    assert found == DOCUMENT[key][column]


@pytest.mark.parametrize("key", GPUS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_golden_table(key: str, count: int) -> None:
    expected = GOLDEN[key][COUNTS.index(count)]
    if expected is None:
        with pytest.raises(PlanError, match="leaves room for -12 samples"):
            latentwire(**gpus(key, count))  # type: ignore[arg-type]
        return
    found = latentwire(**gpus(key, count))  # type: ignore[arg-type]
    assert (found.strategy, found.copies, found.capacity) == expected
    every = (tuple(range(count)),) * 2
    assert (found.layout["llama"], found.layout["qwen"]) == LAYOUTS.get(found.strategy, every)
    assert found.effective_batch == 64 == sum(map(sum, found.micro_batches))
    assert all(1 <= size <= found.capacity for micro_batches in found.micro_batches for size in micro_batches)


@given(
    count=st.integers(0, 16),
    gigabytes=st.integers(1, 200),
    name=st.sampled_from([name for name, _ in GPUS.values()]),
    models=st.sampled_from(["both", "llama", "qwen", "sequential"]),
    target=st.integers(0, 300),
    util=st.floats(0.1, 1.0),
    scale=st.booleans(),
)
def test_no_batch_is_below_one_and_the_effective_batch_is_exact(
    count: int, gigabytes: int, name: str, models: Models, target: int, util: float, scale: bool
) -> None:
    try:
        found = latentwire(
            gpu_name=name, total_bytes=[gigabytes * GB] * count, models=models,
            target=target, target_util=util, scale_batch=scale,
        )  # fmt: skip
    except PlanError:
        return
    sizes = [size for micro_batches in found.micro_batches for size in micro_batches]
    assert len(found.micro_batches) == found.copies and all(1 <= size <= found.capacity for size in sizes)
    expected = 64 * found.copies if scale else target or 64
    assert sum(sizes) == found.effective_batch == expected
    assert ("other mathematics" in found.note) == scale


def test_one_model_after_the_other_takes_the_room_of_the_larger() -> None:
    alone = latentwire(**gpus("A100-40", 2), models="llama")  # type: ignore[arg-type]
    assert latentwire(**gpus("A100-40", 2), models="sequential").capacity == alone.capacity == 21  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="one model after the other"):
        latentwire(**gpus("4090", 2))  # type: ignore[arg-type]
    assert latentwire(**gpus("4090", 2), models="sequential").capacity == 5  # type: ignore[arg-type]


def test_h100s_are_asked_whether_they_have_the_memory() -> None:
    with pytest.raises(PlanError, match="ddp leaves room for"):
        latentwire(gpu_name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total_bytes=[10 * GB] * 2)


def test_a_processor_takes_one_sample_at_a_time() -> None:
    found = latentwire(gpu_name="CPU", total_bytes=[])
    assert (found.strategy, found.capacity, dict(found.layout)) == ("single_device", 1, {})
    assert found.micro_batches == ((1,) * 64,)


def test_growth_is_what_the_document_did_and_says_so() -> None:
    assert latentwire(**gpus("H100", 4), scale_batch=True).effective_batch == 256  # type: ignore[arg-type]
    assert latentwire(**gpus("A100-40", 4), scale_batch=True).effective_batch == 128  # type: ignore[arg-type]


# One model of this toolkit by the same rules


def decide(machine: str, *, facts: dict[str, Any] | None = None, **changes: Any) -> Plan:
    policy = {
        "elastic_policy": "latentwire", "elastic_base_batch": 64, "elastic_target_util": 75,
        "auto_method": "predict", "channels_last": False,
    }  # fmt: skip
    known = {"parameters": 10**9, "bytes_per_sample": GB} | (facts or {})
    return plan(
        make_config("lenet5", **policy | changes), parse_gpu(machine), make_facts("lenet5", **known),
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
