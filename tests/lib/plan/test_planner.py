"""What is decided for a machine, and what is refused with which way out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from lib.errors import PlanError
from lib.plan import plan
from lib.plan.fitting import split_evenly
from lib.plan.gpus import parse_gpu
from lib.plan.types import Device, Hardware, Plan, fixed_plan, rank_shares
from tests.support.configs import ROOT, hardware_names, load_hardware, make_config, make_facts

REFUSED_AS_MIXED = ("mixed-rtx4090-rtx3090-x2", "mixed-w7900-integrated")


def planned(
    model: str, hardware: str | Hardware, *, facts: dict[str, Any] | None = None, **changes: Any
) -> Plan:
    machine = load_hardware(hardware) if isinstance(hardware, str) else hardware
    return plan(make_config(model, **changes), machine, make_facts(model, **(facts or {})))


def refusal(model: str, hardware: str | Hardware, **changes: Any) -> str:
    with pytest.raises(PlanError) as caught:
        planned(model, hardware, **changes)
    assert caught.value.exit_code == 2
    return str(caught.value)


def gpus(count: int, *, free_gb: float = 24.0, name: str = "NVIDIA A10G") -> Hardware:
    device = Device(name=name, total_bytes=256 * 10**9, free_bytes=int(free_gb * 1e9), capability=(8, 6))
    return Hardware(kind="cuda", devices=(device,) * count, cpu_name="Test", cpu_count=8)


def test_the_worked_example() -> None:
    decided = planned("resnet18", "h100-80g-70g-free", target_effective_batch=512)
    assert (decided.micro_batch, decided.accumulation, decided.effective_batch) == (64, 8, 512)
    assert decided.compile and decided.precision == "bf16" and decided.norm_batch == 32
    assert decided.reasons["micro_batch"] == (
        "free memory 70.0 GB x 0.8 = 56.0 GB is in the 32 GB tier: "
        "32 with compile, x 2.0 for resnet18 = 64; divides 512"
    )


def test_a_model_without_a_scale_is_planned_by_hand_only() -> None:
    text = refusal("lenet5", "t4", table_scale=None)
    assert "models/lenet5/Kconfig gives it no TABLE_SCALE" in text and "CONFIG_HYPER_PARAM_MANUAL=y" in text
    decided = planned("lenet5", "t4", table_scale=None, hyper_param="manual", batch_size=64)
    assert (decided.micro_batch, decided.effective_batch) == (64, 512)


def test_a_model_without_a_recommended_target_needs_one() -> None:
    nothing = {"recommended_target": None}
    by_hand = {"hyper_param": "manual", "batch_size": 64}
    for changes in ({}, {"batch_table_strict": True}, by_hand):
        text = refusal("lenet5", "t4", **nothing, **changes)
        assert "no RECOMMENDED_TARGET" in text and "set CONFIG_TARGET_EFFECTIVE_BATCH" in text
    assert planned("lenet5", "t4", **nothing, target_effective_batch=128).effective_batch == 128
    assert planned("lenet5", "t4", **nothing, **by_hand, gradient_accumulation=3).effective_batch == 192


def test_bf16_of_an_amd_gpu_goes_by_name_in_either_case() -> None:
    for name, precision in (("AMD Instinct mi300x", "bf16"), ("AMD Radeon RX 6800 XT", "fp32")):
        device = Device(name=name, total_bytes=10**11, free_bytes=10**11, capability=None)
        machine = Hardware(kind="rocm", devices=(device,), cpu_name="Test", cpu_count=8)
        assert planned("lenet5", machine).precision == precision


@pytest.mark.parametrize("model", ["lenet5", "resnet18", "resnet50"])
def test_a_default_configuration_trains_alike_on_every_machine(model: str) -> None:
    target = make_config(model).recommended_target
    for name in hardware_names():
        if name in REFUSED_AS_MIXED:
            assert "CUDA_VISIBLE_DEVICES=" in refusal(model, name)
            continue
        decided = planned(model, name)
        assert (decided.effective_batch, decided.norm_batch) == (target, 0 if model == "lenet5" else 32), name
        assert sum(decided.micro_batches) * decided.world == target
        assert all(size % (decided.norm_batch or 1) == 0 for size in decided.micro_batches)
        assert all(reason and "\n" not in reason for reason in decided.reasons.values())


def test_a_plan_survives_json() -> None:
    decided = planned("resnet50", "rtx2060-6g-x8")
    assert Plan.from_json(json.loads(json.dumps(decided.to_json()))) == decided


# Devices


def test_the_fullest_of_the_used_devices_counts() -> None:
    device = gpus(1, free_gb=41.0).devices[0]
    fuller = dataclasses.replace(device, free_bytes=21_000_000_000)
    two = dataclasses.replace(gpus(2), devices=(device, fuller))
    assert planned("lenet5", two).micro_batch == 16 * 4
    assert planned("lenet5", two, num_devices=1).micro_batch == 32 * 4


def test_identical_gpus_of_a_mixed_machine_are_used_and_the_rest_is_named() -> None:
    decided = planned("lenet5", "mixed-rtx3090-x2-rtx4090")
    assert decided.world == 2
    assert "1 x NVIDIA GeForce RTX 4090 left out" in decided.reasons["world"]
    assert "RTX 3090" in decided.reasons["device"]


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("mixed-rtx4090-rtx3090-x2", "CUDA_VISIBLE_DEVICES=1,2 (NVIDIA GeForce RTX 3090)"),
        ("mixed-w7900-integrated", "CUDA_VISIBLE_DEVICES=0 (AMD Radeon PRO W7900)"),
    ],
)
def test_other_mixed_machines_are_refused(name: str, way_out: str) -> None:
    for num_devices in (0, 1):
        assert way_out in refusal("lenet5", name, num_devices=num_devices)


def test_too_many_devices_are_refused() -> None:
    assert "the machine has 4 devices" in refusal("lenet5", "h100-80g-70g-free-x4", num_devices=5)
    assert "not all of one model" in refusal("lenet5", "mixed-rtx3090-x2-rtx4090", num_devices=3)
    assert "the machine has 1 device" in refusal("lenet5", "m2-max", num_devices=2)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert "CONFIG_DEVICE_CUDA" in refusal("lenet5", "cpu-8g", device="cuda")
    assert "CONFIG_DEVICE_CPU" in refusal("lenet5", "a10g", device="cpu")
    assert planned("lenet5", "w7900", device="cuda").device == "rocm"


def test_processes_on_the_cpu() -> None:
    assert planned("lenet5", "cpu-256g").world == 1
    decided = planned("resnet18", "cpu-24g-amx", num_devices=2)
    assert (decided.world, decided.micro_batch, decided.accumulation) == (2, 32, 8)


def test_no_free_memory_is_an_error_and_little_is_told() -> None:
    assert "no memory is free on device 0" in refusal("lenet5", gpus(1, free_gb=0))
    assert "only 0.3 GB is free" in planned("lenet5", gpus(1, free_gb=0.3)).reasons["micro_batch"]
    assert "is free, which may not do" not in planned("lenet5", gpus(1, free_gb=1.0)).reasons["micro_batch"]


# Compilation and precision


@pytest.mark.parametrize(
    ("name", "compiled", "precision"),
    [
        ("h100-80g-70g-free", True, "bf16"),
        ("h100-mig-1g.10gb", True, "bf16"),
        ("b200", True, "bf16"),
        ("a100-40g", True, "bf16"),
        ("t4", True, "fp16"),
        ("v100-16g", True, "fp16"),
        ("p100-16g", False, "fp32"),
        ("w7900", False, "bf16"),
        ("mi210", False, "bf16"),
        ("mi300x", True, "bf16"),
        ("m2-max", False, "fp32"),
        ("cpu-8g", False, "fp32"),
        ("cpu-24g-amx", False, "bf16"),
        ("cpu-24g-avx512", False, "bf16"),
    ],
)
def test_automatic_compilation_and_precision(name: str, compiled: bool, precision: str) -> None:
    decided = planned("lenet5", name)
    assert (decided.compile, decided.precision) == (compiled, precision)


def test_compilation_is_settled_before_the_batch() -> None:
    assert planned("lenet5", "mi210").micro_batch == 4 * 16  # 54.8 GB usable, the column without compile
    by_hand = planned("lenet5", "mi210", compile="manual", compile_model=True)
    assert by_hand.compile and by_hand.micro_batch == 4 * 32
    assert "in spite of" in by_hand.reasons["compile"]
    assert planned("lenet5", "cpu-8g", compile="manual", compile_model=True).compile


def test_what_a_device_cannot_do_is_refused() -> None:
    assert "8.0" in refusal("lenet5", "t4", precision="bf16")
    assert "CUDA and ROCm" in refusal("lenet5", "cpu-8g", precision="fp16")
    assert "CUDA and ROCm" in refusal("lenet5", "m2-max", precision="fp16")
    assert "7.0" in refusal("lenet5", "p100-16g", compile="manual", compile_model=True)
    assert "no bf16 instructions" in planned("lenet5", "cpu-8g", precision="bf16").reasons["precision"]
    assert planned("lenet5", "h100-80g-70g-free", precision="fp32").precision == "fp32"


def test_it_is_said_how_a_device_was_chosen() -> None:
    named = planned("lenet5", parse_gpu("h100-80gx3"))
    assert "HBM3: by name (CONFIG_DEVICE_AUTO=y)" in named.reasons["device"]
    assert named.reasons["world"] == "3 equal GPUs (CONFIG_NUM_DEVICES=0)"
    assert "preferred to the CPU (CONFIG_DEVICE_AUTO=y)" in planned("lenet5", "a10g").reasons["device"]


def test_a_gpu_is_denied_however_its_driver_spells_it() -> None:
    device = Device(name="amd radeon pro w7900", total_bytes=10**11, free_bytes=10**11, capability=None)
    decided = planned("lenet5", Hardware(kind="rocm", devices=(device,), cpu_name="Test", cpu_count=8))
    assert not decided.compile and "known ROCm faults" in decided.reasons["compile"]


def test_the_memory_layout_is_the_one_that_was_asked_for() -> None:
    for channels_last in (False, True):
        assert planned("resnet18", "a10g", channels_last=channels_last).channels_last is channels_last


# The effective batch


def test_devices_share_any_target() -> None:
    three = planned("lenet5", gpus(3), target_effective_batch=512)
    assert (three.effective_batch, three.shares) == (512, (171, 171, 170)) and three.is_padded
    assert "of 3 devices 2 have 171 and 1 has 170 (0.2% idle)" in three.reasons["effective_batch"]
    groups = planned("resnet18", gpus(3), target_effective_batch=512)
    assert groups.shares == (6 * 32, 5 * 32, 5 * 32)
    assert "of 3 devices 1 has 192 and 2 have 160 (11.1% idle)" in groups.reasons["effective_batch"]
    one_each = planned("lenet5", gpus(3), target_effective_batch=4)
    assert one_each.shares == (2, 1, 1)
    assert "each of 3 devices needs at least a sample" in refusal("lenet5", gpus(3), target_effective_batch=2)


@pytest.mark.parametrize("compiled", [False, True])
def test_micro_batches_of_all_ranks_add_up(compiled: bool) -> None:
    for target, world, unit in itertools.product(range(1, 40), range(1, 8), (1, 3)):
        if target % unit or target < world * unit:
            continue
        share = rank_shares(target, world=world, unit=unit)
        for bound in range(unit, share[0] + unit, unit):
            split = split_evenly(share[0], bound=bound, step=unit)
            sizes = dataclasses.asdict(split) | {
                "effective_batch": target,
                "norm_batch": unit if unit > 1 else 0,
            }
            plan = fixed_plan("of this test", world=world, compile=compiled, **sizes)
            ranks = [plan.micro_batches_of(rank) for rank in range(world)]
            assert [sum(own) for _, own in ranks] == [*share] and max(share) - min(share) in (0, unit)
            assert {len(rows) for rows, _ in ranks} == {plan.accumulation}
            for rows, own in ranks:
                assert all(
                    0 <= size <= row and row % unit == 0 == size % unit
                    for row, size in zip(rows, own, strict=True)
                )
                assert max(rows) <= bound and min(rows) >= (plan.micro_batch if compiled else unit)


def test_a_target_above_the_training_set_is_refused_with_the_largest() -> None:
    text = refusal("resnet18", "cpu-8g", target_effective_batch=512, facts={"train_size": 500})
    assert "only 500 training samples" in text and text.endswith("CONFIG_TARGET_EFFECTIVE_BATCH=480")
    few = refusal("resnet18", "cpu-8g", target_effective_batch=8, facts={"train_size": 31})
    assert few.endswith("with 31 samples set CONFIG_NORM_BATCH=8")
    facts = {"train_size": 31}
    assert planned("resnet18", "cpu-8g", target_effective_batch=8, norm_batch=8, facts=facts).norm_batch == 8
    assert planned("lenet5", "cpu-8g", facts={"train_size": 512}).effective_batch == 512
    assert "only 511 training samples" in refusal("lenet5", "cpu-8g", facts={"train_size": 511})


def test_an_uneven_last_micro_batch_only_where_nothing_depends_on_it() -> None:
    decided = planned("lenet5", "cpu-8g", target_effective_batch=509)
    assert (decided.micro_batch, decided.accumulation, decided.last_micro_batch) == (64, 8, 61)
    compiled = planned("lenet5", "a10g", target_effective_batch=509)
    assert (compiled.micro_batch, compiled.accumulation, compiled.last_micro_batch) == (64, 8, 61)
    assert "torch.compile gets 64 rows, the others of weight 0" in compiled.reasons["last_micro_batch"]
    assert compiled.micro_batches_of(0) == ((64,) * 8, (64,) * 7 + (61,))
    plain = {"norm_batch": 0, "target_effective_batch": 509}
    text = refusal("resnet18", "a10g", **plain)
    assert "over the micro-batch needs micro-batches of one size" in text and "=506 or 510" in text
    assert "allows no padding" in refusal("resnet18", gpus(3), norm_batch=0, target_effective_batch=512)


def test_norm_batch_is_kept_or_refused() -> None:
    assert "=480 or 512" in refusal("resnet18", "cpu-8g", target_effective_batch=500)
    eight = refusal("resnet18", "rtx2060-6g-x8", target_effective_batch=128)
    assert "needs at least a group of CONFIG_NORM_BATCH=32 samples" in eight and eight.endswith("=256")
    plain = planned("resnet18", "rtx2060-6g-x8", target_effective_batch=128, norm_batch=0)
    assert plain.effective_batch == 128 and "not portable" in plain.reasons["norm_batch"]


def test_half_of_what_fits_must_be_used() -> None:
    # Seven groups of 32 have no divisor between 32 and 224.
    eager: dict[str, Any] = {"compile": "manual", "compile_model": False, "target_effective_batch": 224}
    assert planned("resnet18", gpus(1, free_gb=41), **eager).micro_batch == 32  # 32 fits
    assert planned("resnet18", gpus(1, free_gb=161), **eager).micro_batch == 224  # 256 fits
    half = planned("resnet18", gpus(1, free_gb=81), **eager)  # 128 fits
    assert half.micro_batches == (128, 96)


@pytest.mark.parametrize("compiled", [False, True])
def test_norm_batch_need_not_divide_what_the_table_gives(compiled: bool) -> None:
    for unit, target in itertools.product((3, 5, 12, 20), (240, 245, 260, 300, 6060)):
        if target % unit:
            continue
        changes = {"compile": "manual", "compile_model": compiled, "norm_batch": unit}
        decided = planned("resnet18", "cpu-8g", target_effective_batch=target, **changes)
        assert sum(decided.micro_batches) == target and max(decided.micro_batches) <= 32
        assert all(size % unit == 0 for size in decided.micro_batches)


def test_norm_batch_above_the_table_is_used_if_it_is_estimated_to_fit() -> None:
    decided = planned("resnet50", "cpu-8g")  # the table says 24
    assert (decided.micro_batch, decided.norm_batch) == (32, 32)
    assert "raised to NORM_BATCH = 32" in decided.reasons["micro_batch"]
    large = {"bytes_per_sample": 86_000_000}
    # 0.38 GB of state + 32 x 86 MB x 1.5 = 4.5 GB of 4.7 GB usable; on a GPU 1.5 GB more.
    assert planned("resnet50", "cpu-8g", facts=large).micro_batch == 32
    # 5.2 GB would fit into the 5.9 GB that are free, but not into the share of it that may be used.
    assert "usable" in refusal("resnet50", "cpu-8g", facts={"bytes_per_sample": 100_000_000})
    text = refusal("resnet50", "rtx2060-6g-x8", facts=large)
    assert "CONFIG_NORM_BATCH to 6 or less" in text and "or to 0" in text
    assert planned("resnet50", "rtx2060-6g-x8", facts=large, norm_batch=4).micro_batch % 4 == 0
    # Two processes share the memory of the machine.
    assert "is more than the free-memory table gives" in refusal(
        "resnet50", "cpu-8g", facts=large, num_devices=2
    )
    assert "not known" in refusal("resnet50", "cpu-8g", facts={"bytes_per_sample": None})


# By hand


def test_a_batch_size_set_by_hand_keeps_the_target() -> None:
    manual: dict[str, Any] = {"hyper_param": "manual", "gradient_accumulation": 0}
    decided = planned("lenet5", "cpu-8g", **manual, batch_size=48)
    assert (decided.micro_batch, decided.accumulation, decided.last_micro_batch) == (48, 11, 32)
    padded = planned("lenet5", "a10g", **manual, batch_size=48)
    assert padded.micro_batches_of(0) == ((48,) * 11, (48,) * 10 + (32,))
    text = refusal("resnet18", "a10g", **manual, batch_size=48, norm_batch=0)
    assert "does not divide it" in text and "=480 or 528" in text
    assert "more than that" in refusal("lenet5", "a10g", **manual, batch_size=1024)
    assert "set it to 64" in refusal("resnet18", "cpu-8g", **manual, batch_size=48)


def test_both_set_by_hand_make_the_target() -> None:
    manual: dict[str, Any] = {"hyper_param": "manual", "batch_size": 64, "gradient_accumulation": 3}
    decided = planned("resnet18", gpus(2), **manual)
    assert (decided.effective_batch, decided.target) == (384, 384)
    assert planned("resnet18", gpus(2), **manual, target_effective_batch=384) == dataclasses.replace(
        decided,
        reasons={**decided.reasons, "target": "CONFIG_TARGET_EFFECTIVE_BATCH=384"},
    )
    assert "contradicts" in refusal("resnet18", gpus(2), **manual, target_effective_batch=512)
    assert "300 training samples" in refusal("resnet18", gpus(2), **manual, facts={"train_size": 300})


# The raw table


def test_strict_table_is_taken_as_it_is_and_tells_by_how_much_it_misses() -> None:
    decided = planned("resnet50", "a10g", batch_table_strict=True, norm_batch=0)  # 16 GB tier
    assert (decided.micro_batch, decided.accumulation, decided.effective_batch) == (24, 10, 240)
    assert "MISSES the target of 256 by -16" in decided.reasons["effective_batch"]
    over = planned("lenet5", "b200", batch_table_strict=True)
    assert (over.micro_batch, over.accumulation, over.effective_batch) == (1024, 1, 1024)
    assert "+512" in over.reasons["effective_batch"]
    assert "not a multiple of CONFIG_NORM_BATCH=32" in refusal("resnet50", "a10g", batch_table_strict=True)


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys, lib.plan, lib.plan.show, lib.plan.tables, lib.devices.probe, lib.hyperparams;"
        "lib.devices.probe.probe('cpu');"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("hardware", [load_hardware("cpu-256g"), gpus(2)], ids=["cpu", "gpus"])
def test_what_each_node_has_set_is_not_the_reason_for_the_processes_of_all(hardware: Hardware) -> None:
    for of_all, reason in ((False, "CONFIG_NUM_DEVICES=2"), (True, "2 processes on all nodes")):
        place = dataclasses.replace(hardware, of_all_nodes=of_all)
        found = planned("lenet5", place, num_devices=2).reasons["world"]
        assert found.startswith(reason) and ("CONFIG_" in found) != of_all


def test_what_is_not_compiled_has_no_compiled_parts() -> None:
    compiled = fixed_plan("of this test", micro_batch=1, compile=True)
    with pytest.raises(ValueError, match="parts of a step are compiled"):
        dataclasses.replace(compiled, compile=False)
    assert not dataclasses.replace(compiled, compile=False, compile_parts=()).compile_parts
