"""The named door: messages to the character, foreign objects, and one path for all callers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from lib import hyperparams
from lib.errors import ConfigError, PlanError
from lib.hyperparams import apply_hyperparams, auto_detect_compile, auto_detect_hyperparams, get_gpu_info
from lib.plan import plan
from lib.plan.types import Hardware
from tests.support.configs import load_hardware, make_config, make_facts

H100 = {
    "gpu_name": "NVIDIA H100",
    "gpu_count": 1,
    "gpu_mem_gb": 80.0,
    "gpu_free_gb": 72.3,
    "has_gpu": True,
}
NO_GPU = {"gpu_name": "CPU", "gpu_count": 0, "gpu_mem_gb": 0.0, "gpu_free_gb": 0.0, "has_gpu": False}


def foreign(**attributes: object) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


def machine(monkeypatch: pytest.MonkeyPatch, name: str) -> Hardware:
    """Let probes find a recorded machine."""
    found = load_hardware(name)
    processor = load_hardware("cpu-8g")
    monkeypatch.setattr(hyperparams, "probe", lambda device: processor if device == "cpu" else found)
    return found


def test_the_two_lines_to_the_character(capsys: pytest.CaptureFixture[str]) -> None:
    config = foreign(HYPER_PARAM_AUTO=True, TARGET_EFFECTIVE_BATCH=512, COMPILE_AUTO=True)
    apply_hyperparams(config, verbose=True, model_type="resnet18", gpu_info=H100)
    assert capsys.readouterr().out == (
        "Hyperparams: AUTO mode - GPU: NVIDIA H100 (80.0GB total, 72.3GB free) × 1, "
        "model=resnet18, compile=ON → batch=64, grad_acc=8 (effective=512, target=512)\n"
        "Compile: Enabled (GPU 'NVIDIA H100' has good torch.compile support)\n"
    )


def test_the_lines_of_other_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, "cpu-8g")
    apply_hyperparams(make_config("lenet5", target_effective_batch=100))
    machine(monkeypatch, "mi210")
    apply_hyperparams(make_config("lenet5", hyper_param="manual", batch_size=128, gradient_accumulation=2))
    auto_detect_compile(foreign(COMPILE_MANUAL=True))
    assert capsys.readouterr().out.splitlines() == [
        "Hyperparams: AUTO mode - CPU: Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz (8.2GB total, 5.9GB free) "
        "× 1, model=lenet5, compile=OFF "
        "→ batch=64, grad_acc=2 (effective=100, target=100, last micro-batch 36)",
        "Compile: Disabled (CPU: compiling costs a short run more than it saves; "
        "CONFIG_COMPILE_MANUAL=y allows it)",
        "Hyperparams: MANUAL mode - GPU: AMD Instinct MI210 (68.7GB total, 68.5GB free) × 1, model=lenet5, "
        "compile=OFF → batch=128, grad_acc=2 (effective=256, target=256)",
        "Compile: Disabled (GPU 'AMD Instinct MI210': torch.compile is not stable on it)",
        "Compile: Disabled (set by hand)",
    ]


def test_the_worked_example_through_the_mapping() -> None:
    found = auto_detect_hyperparams(
        foreign(), target_effective_batch=512, model_type="resnet18", gpu_info={**H100, "gpu_free_gb": 70.0}
    )
    assert (found["batch_size"], found["gradient_accumulation"], found["effective_batch"]) == (64, 8, 512)
    assert "batch=64, grad_acc=8 (effective=512, target=512)" in found["rationale"]


@pytest.mark.parametrize(
    ("model", "batch", "target"),
    [("gpt2", 16, 1024), ("resnet50", 16, 256), ("resnet18", 32, 512), ("lenet5", 64, 512)],
)
def test_a_processor_reaches_the_target(model: str, batch: int, target: int) -> None:
    found = auto_detect_hyperparams(foreign(), model_type=model, gpu_info=NO_GPU)
    assert (found["batch_size"], found["effective_batch"]) == (batch, target)
    assert found["batch_size"] * found["gradient_accumulation"] == target and not found["compile"]


def test_a_mutable_object_is_changed_as_the_plan_says() -> None:
    config = foreign(HYPER_PARAM_AUTO="y", COMPILE_AUTO="y", TARGET_EFFECTIVE_BATCH="512", OTHER=7)
    decided = apply_hyperparams(config, verbose=False, gpu_info={**H100, "gpu_count": 4})
    assert (decided.micro_batch, decided.accumulation, decided.world) == (64, 2, 4)
    assert (config.BATCH_SIZE, config.GRADIENT_ACCUMULATION, config.COMPILE_MODEL) == (64, 2, True)
    assert config.OTHER == 7 and config.TARGET_EFFECTIVE_BATCH == "512"


def test_foreign_callers_never_get_an_uneven_last_micro_batch() -> None:
    config = foreign(TARGET_EFFECTIVE_BATCH=100, COMPILE_MANUAL=True)
    decided = apply_hyperparams(config, verbose=False, model_type="lenet5", gpu_info=NO_GPU)
    assert config.BATCH_SIZE * config.GRADIENT_ACCUMULATION == decided.effective_batch == 100
    with pytest.raises(PlanError, match="this caller needs micro-batches of one size"):
        apply_hyperparams(foreign(TARGET_EFFECTIVE_BATCH=509), model_type="lenet5", gpu_info=NO_GPU)


def test_manual_is_respected_and_compilation_still_resolved() -> None:
    config = foreign(
        HYPER_PARAM_MANUAL=True,
        BATCH_SIZE=24,
        GRADIENT_ACCUMULATION=3,
        COMPILE_AUTO=True,
        COMPILE_MODEL=False,
    )
    for _ in range(2):  # applying it again changes nothing
        apply_hyperparams(config, verbose=False, gpu_info=H100)
        assert (config.BATCH_SIZE, config.GRADIENT_ACCUMULATION, config.COMPILE_MODEL) == (24, 3, True)
    config = foreign(HYPER_PARAM_MANUAL=True, BATCH_SIZE=128)
    apply_hyperparams(config, verbose=False, gpu_info=H100)
    assert (config.BATCH_SIZE, config.GRADIENT_ACCUMULATION) == (128, 4)
    assert auto_detect_hyperparams(config, model_type="resnet18", gpu_info=H100)["batch_size"] == 64


def test_a_refusal_leaves_the_object_as_it_was() -> None:
    config = foreign(TARGET_EFFECTIVE_BATCH=509)
    with pytest.raises(PlanError):
        apply_hyperparams(config, gpu_info=H100)
    assert vars(config) == {"TARGET_EFFECTIVE_BATCH": 509}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"HYPER_PARAM_AUTO": True, "HYPER_PARAM_MANUAL": True}, "HYPER_PARAM_MANUAL are both set"),
        ({"HYPER_PARAM_MANUAL": True}, "CONFIG_BATCH_SIZE"),
        ({"HYPER_PARAM_MANUAL": True, "BATCH_SIZE": 0}, "CONFIG_BATCH_SIZE"),
        ({"TARGET_EFFECTIVE_BATCH": "many"}, "TARGET_EFFECTIVE_BATCH is 'many'"),
        ({"TARGET_EFFECTIVE_BATCH": True}, "TARGET_EFFECTIVE_BATCH is True"),
        ({"NORM_BATCH": -1}, "NORM_BATCH is -1"),
        ({"COMPILE_AUTO": "maybe"}, "COMPILE_AUTO is 'maybe'"),
        ({"DEVICE": "tpu"}, "DEVICE is 'tpu'"),
        ({"DEVICE": "cpu"}, "CONFIG_DEVICE_CPU is not possible"),
        ({"NUM_DEVICES": 2}, "CONFIG_NUM_DEVICES=2, and the machine has 1 device"),
    ],
)
def test_malformed_attributes_are_errors(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_hyperparams(foreign(**attributes), gpu_info=H100)


def test_an_unknown_model_names_the_known_ones() -> None:
    for door in (apply_hyperparams, auto_detect_hyperparams):
        with pytest.raises(
            ConfigError, match="'vgg' is not in the table; known are gpt2, lenet5, resnet18, resnet50"
        ):
            door(foreign(), model_type="vgg", gpu_info=H100)


def test_the_frozen_config_and_the_trainer_share_one_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, facts = make_config("resnet18"), make_facts("resnet18")
    before = dataclasses.asdict(config.replace(model_options={}, data_options={}, task_options={}))
    found = machine(monkeypatch, "h100-80g-70g-free-x4")
    decided = apply_hyperparams(config, model_type="lenet5", hardware=found, facts=facts)
    assert decided == plan(config, found, facts) == apply_hyperparams(config, verbose=False)
    assert dataclasses.asdict(config.replace(model_options={}, data_options={}, task_options={})) == before
    assert "model=resnet18" in capsys.readouterr().out  # a Config names its own model
    assert auto_detect_hyperparams(config)["plan"] == decided


def test_a_config_without_facts_uses_what_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "cpu-24g-amx")
    decided = apply_hyperparams(make_config("resnet50"), verbose=False)
    assert (decided.micro_batch, decided.norm_batch) == (32, 32)
    with pytest.raises(PlanError, match="what newnet would need for it is not known"):
        apply_hyperparams(make_config("resnet50").replace(model="newnet"), verbose=False)


def test_a_config_for_the_processor_does_not_ask_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "b200")
    assert apply_hyperparams(make_config("lenet5", device="cpu"), verbose=False).device == "cpu"
    assert apply_hyperparams(make_config("lenet5"), verbose=False).device == "cuda"


def test_gpu_info_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "rtx2060-6g-x8")
    found = get_gpu_info()
    assert (found["gpu_name"], found["gpu_count"], found["has_gpu"]) == ("NVIDIA GeForce RTX 2060", 8, True)
    assert (round(found["gpu_mem_gb"], 3), round(found["gpu_free_gb"], 3)) == (6.225, 6.002)  # the fullest
    machine(monkeypatch, "mixed-rtx3090-x2-rtx4090")
    assert get_gpu_info()["gpu_count"] == 2
    machine(monkeypatch, "cpu-8g")
    assert get_gpu_info() == NO_GPU
    machine(monkeypatch, "mixed-w7900-integrated")
    with pytest.raises(PlanError, match="the GPUs are mixed"):
        get_gpu_info()


@pytest.mark.parametrize(
    ("name", "compiled"), [("w7900", False), ("mi210", False), ("mi300x", True), ("t4", True)]
)
def test_compilation_by_device(monkeypatch: pytest.MonkeyPatch, name: str, compiled: bool) -> None:
    machine(monkeypatch, name)
    assert auto_detect_compile(foreign(COMPILE_AUTO=True), verbose=False) == compiled
    assert auto_detect_compile(foreign(COMPILE_MANUAL=True, COMPILE_MODEL=True), verbose=False)
