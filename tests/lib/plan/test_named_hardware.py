"""Machines that are only named: what `GPU=` takes, what is refused, and that plans come out the same."""

from __future__ import annotations

import pytest

from lib.errors import ConfigError
from lib.plan import plan
from lib.plan.gpus import CATALOGUE, find_gpu, machine_names, parse_gpu
from tests.support.configs import hardware_names, load_hardware, make_config, make_facts

# What to write for each recorded machine. Mixed machines have no name.
TEXTS = {
    "a100-40g": "a100-40g",
    "a100-80g": "a100-80g",
    "a10g": "a10g",
    "b200": "b200",
    "cpu-24g-amx": "cpu-24g-amxx2",
    "cpu-24g-avx512": "cpu-24g-avx512x2",
    "cpu-256g": "cpu-256gx128",
    "cpu-8g": "cpu-8g:5.5Gi",
    "h100-80g-70g-free": "h100-80g:70G",
    "h100-80g-70g-free-x4": "h100-80gx4:70G",
    "h100-mig-1g.10gb": "h100-mig-1g.10gb",
    "h200": "h200",
    "l40s": "l40s",
    "m2-max": "m2-max",
    "mi210": "mi210",
    "mi300x": "mi300x",
    "p100-16g": "p100-16g",
    "rtx2060-6g-x8": "rtx2060-6gx8",
    "rtx3090": "rtx3090",
    "rtx4090": "rtx4090",
    "t4": "t4",
    "v100-16g": "v100-16g",
    "w7900": "w7900",
}

MALFORMED = [
    "", " ", ":", "x", "x4", ":70G", "x4:70G", "all:70G", "allx4", "all ", "none", "cuda", "gpu", "nvidia",
    "h100", "h100-80", "h100-80gb", "H100 80GB", "h100_80g", "h200-140", "rtx3091", "rtx 9090", "mi999", "t5",
    "v100", "a100", "a100-60g", "k80", "tpu-v4", "m9-max", "h100-80gx0", "h100-80gx-1", "h100-80gx1.5",
    "h100-80gx1025", "h100-80gx99999999999999999999", "h100-80gx", "h100-80gxx4", "h100-80g x 4",
    "h100-80g*4", "4xh100-80g", "h100-80g,rtx3090", "h100-80g+rtx3090", "h100-80g:", "h100-80g:70",
    "h100-80g:70GB", "h100-80g:70GiB", "h100-80g:70M", "h100-80g:-1G", "h100-80g:0G", "h100-80g:0.0Gi",
    "h100-80g:85G", "h100-80g:80Gi", "h100-80g:1e3G", "h100-80g:nanG", "h100-80g:infG", "h100-80g:.5G",
    "h100-80g:5.G", "h100-80g:70,5G", "h100-80g:70 G", "h100-80g:50%", "h100-80g::70G", "h100-80g:70G:70G",
    "h100-80g:x4", "h100-80g:70Gx4", "h100-80g\n", "h100-80g\nx4", "\x1b[31mh100-80g", "ｈ100-80g",
    "h100-80g:٧٠G", "h100-80g:" + "9" * 400 + "G", "a" * 5000, "cpu", "cpu-", "cpu-g", "cpu-0g",
    "cpu-24", "cpu-24gb", "cpu-24Gi", "cpu-24g-sse", "cpu-24gx0", "cpu-24gx99999", "cpu-24g:25Gi",
    "cpu-999999g", "cpu-24g-amx16",
]  # fmt: skip


def test_every_recorded_machine_of_one_model_has_a_text() -> None:
    # A recorded TPU has the name that torch_xla gives it, without the generation.
    assert {name for name in hardware_names() if not name.startswith(("mixed-", "tpu-"))} == set(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("model", ["lenet5", "resnet18", "resnet50"])
def test_a_named_machine_is_planned_for_as_the_recorded_one(model: str, name: str) -> None:
    config, facts = make_config(model), make_facts(model)
    named, recorded = (plan(config, each, facts) for each in (parse_gpu(TEXTS[name]), load_hardware(name)))
    for field in ("device", "world", "micro_batches", "effective_batch", "precision", "compile"):
        assert getattr(named, field) == getattr(recorded, field), field


@pytest.mark.parametrize("name", TEXTS)
def test_what_the_driver_would_say(name: str) -> None:
    named, recorded = parse_gpu(TEXTS[name]), load_hardware(name)
    assert (named.kind, len(named.devices)) == (recorded.kind, len(recorded.devices))
    if named.kind != "cpu":
        facts = [(device.name, device.total_bytes, device.capability) for device in named.devices]
        assert facts == [(device.name, device.total_bytes, device.capability) for device in recorded.devices]
    else:
        assert named.cpu_bf16 == recorded.cpu_bf16 and named.cpu_count == recorded.cpu_count
        # A kernel keeps a little of what is sold as 24 GiB.
        assert 0.94 < recorded.devices[0].total_bytes / named.devices[0].total_bytes <= 1
    # An idle machine differs by what its desktop takes.
    for one, other in zip(named.devices, recorded.devices, strict=True):
        assert one.free_bytes == pytest.approx(other.free_bytes, rel=0.04)


@pytest.mark.parametrize("key", [key for key, gpu in CATALOGUE.items() if gpu.kind != "tpu"])
def test_every_key_is_read_with_count_and_free_memory(key: str) -> None:
    for text, count in ((key, 1), (key.upper(), 1), (f"{key}x1", 1), (f"{key}x16", 16)):
        machine = parse_gpu(text)
        found = find_gpu(machine.devices[0].name)
        assert found is not None and found.key == key
        assert machine.devices == machine.devices[:1] * count and machine.kind == found.kind
        assert 0.98 * found.total_bytes < machine.devices[0].free_bytes <= found.total_bytes
    assert parse_gpu(f"{key}x3:4.5G").devices[2].free_bytes == 4_500_000_000
    assert parse_gpu(f"{key}:4Gi").devices[0].free_bytes == 4 * 2**30


def test_free_memory_may_be_all_there_is() -> None:
    assert parse_gpu("h100-80g:84.942979072G").devices[0].free_bytes == 84_942_979_072
    with pytest.raises(ConfigError):
        parse_gpu("h100-80g:84.942979073G")


def test_a_processor() -> None:
    machine = parse_gpu("cpu-64g-amxx16:40Gi")
    assert (machine.kind, machine.cpu_count, machine.cpu_bf16) == ("cpu", 16, "amx")
    assert (machine.devices[0].total_bytes, machine.devices[0].free_bytes) == (64 * 2**30, 40 * 2**30)
    assert parse_gpu("cpu-24g").cpu_bf16 == "none"


def test_all_stands_for_the_catalogue() -> None:
    gpus = [key for key, gpu in CATALOGUE.items() if gpu.kind != "tpu"]
    assert (
        machine_names("all")
        == machine_names("ALL")
        == (*gpus, "tpu-v4-8", "tpu-v5e-8", "tpu-v5p-8", "tpu-v6e-8")
    )
    assert machine_names("t4x2") == ("t4x2",)
    of_four = machine_names(" allX4")
    assert {"t4x4", "mi300xx4", "tpu-v4-8", "tpu-v5e-4"} < {*of_four}
    assert not {"m2-maxx4", "tpu-v5e-8", "tpu-v6e-1"} & {*of_four}
    assert {len(parse_gpu(name).devices) for name in of_four} == {4}
    with pytest.raises(ConfigError, match=r"GPU=.*x0 cannot be planned for"):
        parse_gpu(machine_names("allx0")[0])
    with pytest.raises(ConfigError, match="one is needed"):
        parse_gpu("all")


@pytest.mark.parametrize("text", MALFORMED)
def test_what_makes_no_sense_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpu(text)
    error = caught.value
    assert error.exit_code == 2 and error.why and error.todo
    line = str(error)
    assert line.startswith("GPU=") and len(line) < 350
    assert line.isprintable(), line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("h100", "did you mean h100-80g or h100-pcie-80g or h100-nvl-94g?"),
        ("h100x4", "there is no 'h100' in the catalogue of GPUs; did you mean h100-80g"),
        ("rtx3091", "did you mean rtx3090"),
        ("NVIDIA H200", "did you mean h200?"),
        ("h100-80g:70", "'70' is not a size of free memory; write it as 70G (decimal) or 65.2Gi"),
        ("h100-80g:85G", "85.0 GB cannot be free of 84.9 GB (79.1 GiB)"),
        ("h100-80gx0", "a machine cannot have 0 GPUs; name 1 to 1024"),
        ("h100-80gx3,rtx3090", "one is needed, with devices of one model; name it as in GPU=h100-80gx3:20Gi"),
        (
            "all:20Gi",
            "one is needed, with devices of one model; name it as in GPU=h100-80gx3:20Gi; make plan",
        ),
        ("allx3", "one is needed, with devices of one model; name it as in GPU=h100-80gx3:20Gi; make"),
        ("h100-80g:70,5G", "'70,5g' is not a size of free memory"),
        ("cpu-24gb", "write cpu-24g, cpu-24g-amx or cpu-24g-avx512"),
    ],
)
def test_the_way_out_is_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_gpu(text)
    assert told in str(caught.value)
