"""TPU slices by Google's names: what the number counts, what is refused, and plans for them."""

from __future__ import annotations

import dataclasses

import pytest

from lib.errors import ConfigError, PlanError
from lib.plan import plan
from lib.plan.gpus import find_gpu, parse_gpu
from lib.plan.planner import compare_strategies
from lib.plan.tpus import GENERATIONS, explain_count, slice_names, slice_of
from tests.support.configs import make_config, make_facts


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("tpu-v4-8", 4, "TPU v4"),
        ("tpu-v5p-8", 4, "TPU v5p"),
        ("TPU-v5e-8", 8, "TPU v5e"),
        ("tpu-v5litepod-8", 8, "TPU v5e"),
        ("tpu-v5e-1", 1, "TPU v5e"),
        ("tpu-v6e-4", 4, "TPU v6e"),
    ],
)
def test_the_number_counts_cores_or_chips(text: str, count: int, name: str) -> None:
    machine = parse_gpu(text)
    assert (machine.kind, len(machine.devices), machine.devices[0].name) == ("tpu", count, name)
    gpu = find_gpu(name)
    assert gpu is not None and machine.devices[0].total_bytes == gpu.total_bytes


def test_every_slice_has_a_row_of_the_catalogue_and_chips_in_its_topology() -> None:
    for text in slice_names():
        found = slice_of(text)
        topology = GENERATIONS[found.generation].hosts[found.number]
        count = 1
        for side in topology.split("x"):
            count *= int(side)
        assert found.devices == count == len(parse_gpu(text).devices)
        assert slice_of(found.accelerator) == found
        assert text.removeprefix("tpu-").split("-")[1] in explain_count(f"TPU {found.generation}", count)


def test_free_memory_is_of_each_device() -> None:
    assert {device.free_bytes for device in parse_gpu("tpu-v4-8:20Gi").devices} == {20 * 2**30}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tpu", "name tpu-v4-8, tpu-v5e-1"),
        ("tpu-v4", "name tpu-v4-8, tpu-v5e-1"),
        ("tpu-v3-8", "'tpu-v3-8' is no TPU slice"),
        ("tpu-v4-4", "there is no tpu-v4-4: the number counts TensorCores, two to a TPU; name tpu-v4-8"),
        ("tpu-v4-12", "there is no tpu-v4-12"),
        ("tpu-v5e-2", "the number counts TPUs; name tpu-v5e-1 or tpu-v5e-4 or tpu-v5e-8"),
        ("tpu-v4-16", "has 8 TPUs, and a host at most 4; a plan is of one: torch_tpu numbers the hosts"),
        ("tpu-v5litepod-16", "has 16 TPUs, and a host at most 8"),
        ("tpu-v4-8x2", "a slice has its number of TPUs in its name; write GPU=tpu-v4-8"),
    ],
)
def test_other_sizes_are_refused_with_those_there_are(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpu(text)
    line = str(caught.value)
    assert line.startswith(f"GPU={text} cannot be planned for") and told in line and len(line) < 350


@pytest.mark.parametrize("device", ["auto", "tpu", "xla"])
def test_a_plan_for_a_slice(device: str) -> None:
    machine = parse_gpu("tpu-v4-8")
    if device == "xla":
        machine = dataclasses.replace(machine, kind="xla")
    decided = plan(make_config("resnet18", device=device), machine, make_facts("resnet18"))
    assert (decided.world, decided.strategy, decided.precision, decided.compile) == (4, "ddp", "bf16", False)
    assert "v4-8 by Google's name, which counts 8 TensorCores" in decided.reasons["world"]
    assert ("set CONFIG_DEVICE_TPU=y" in decided.reasons["device"]) == (device == "auto")
    assert "EXPERIMENTAL" in decided.reasons["device"]


def test_replicas_are_the_only_strategy_that_is_possible() -> None:
    config = make_config("resnet18", device="tpu")
    found = compare_strategies(config, parse_gpu("tpu-v4-8"), make_facts("resnet18"), predict=None)
    possible = [each.layout.strategy for each in found if each.split is not None]
    assert possible == ["ddp"] and len(found) > 3


def test_a_slice_is_not_a_gpu() -> None:
    with pytest.raises(PlanError, match="CONFIG_DEVICE_CUDA is not possible"):
        plan(make_config("lenet5", device="cuda"), parse_gpu("tpu-v4-8"), make_facts("lenet5"))


def test_a_device_of_another_kind_has_no_name_of_a_slice() -> None:
    assert explain_count("NVIDIA H200", 8) == explain_count("TPU", 4) == explain_count("TPU v4", 3) == ""
