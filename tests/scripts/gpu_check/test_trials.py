"""What a worker of the checks on a real GPU does for a request, with the GPU played."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib.memory.allocator import MIB, replay
from lib.plan.gpus import gpu_of
from scripts.gpu_check import cases, trials
from scripts.gpu_check.cases import (
    CASES,
    Setting,
    open_setting,
    random_text,
    table_choice,
    training_of,
)
from scripts.gpu_check.parts import BUSY, SIZES
from scripts.gpu_check.trials import HANDLERS, events_of
from train.planning import step_estimate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["lenet5", pytest.param("resnet18", marks=pytest.mark.long)])
def test_cases_train(case: str) -> None:
    step = CASES[case].step
    setting = Setting(case=case, micro_batch=step, accumulation=2, precision="fp32", device="cpu")
    opened = open_setting(setting)
    assert (opened.plan.micro_batch, opened.plan.accumulation) == (step, 2)
    training = training_of(opened)
    assert training.run(steps=1) > 0 and training.progress.step == 1


# As these models are known: ResNet-50 with the stem for large images, GPT-2 with its vocabulary filled up.
PARAMETERS = {"lenet5": 61_706, "resnet18": 11_173_962, "resnet50": 25_557_032, "gpt2": 124_475_904}


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_what_it_says_and_planned_as_asked(case: str) -> None:
    setting = Setting(case=case, micro_batch=max(SIZES[case]), precision="fp32", compile=True, device="cpu")
    opened = open_setting(setting)
    plan, options = opened.plan, opened.config.model_options
    assert opened.data.facts.parameters == PARAMETERS[case]
    assert options.get("stem") == {"resnet18": "cifar", "resnet50": "imagenet"}.get(case)
    assert (plan.micro_batch, plan.precision, plan.compile) == (max(SIZES[case]), "fp32", True)
    assert all(size % CASES[case].step == 0 for size in (*SIZES[case], BUSY[case]))


def test_any_batch_is_planned_where_it_is_asked_for() -> None:
    setting = Setting(case="resnet18", micro_batch=7, precision="fp32", any_batch=True, device="cpu")
    plan = open_setting(setting).plan
    assert (plan.micro_batch, plan.norm_batch) == (7, 0)


def test_the_table_is_asked() -> None:
    assert table_choice(Setting(case="resnet18", micro_batch=32), free_bytes=70 * 10**9) == 32
    compiled = Setting(case="resnet18", micro_batch=32, compile=True)
    assert table_choice(compiled, free_bytes=70 * 10**9) == 64


def test_a_recorded_history_is_replayed() -> None:
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 20 * MIB, "stream": 0},
        {"action": "alloc", "addr": 0, "size": 3 * MIB, "stream": 0},
        {"action": "alloc", "addr": 3 * MIB, "size": 5 * MIB, "stream": 0},
        {"action": "free_requested", "addr": 0, "size": 3 * MIB, "stream": 0},
        {"action": "alloc", "addr": 8 * MIB, "size": 4 * MIB, "stream": 0},
        {"action": "free_completed", "addr": 0, "size": 3 * MIB, "stream": 0},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
    ]
    simulated = replay(events_of(trace))
    assert (simulated.peak_allocated_bytes, simulated.peak_reserved_bytes) == (12 * MIB, 20 * MIB)
    assert simulated.allocated_bytes == 9 * MIB


@pytest.fixture
def played_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda as the trials use it, of a card with 80 GiB; training itself is on the CPU."""
    told = SimpleNamespace(fractions=[], recording=[], settings=[])
    trace = [
        {"action": "alloc", "addr": 0, "size": 22 * MIB},
        {"action": "free_completed", "addr": 0, "size": 22 * MIB},
    ]
    played: dict[str, Any] = {
        "init": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "reset_accumulated_memory_stats": lambda: None,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=80 * 2**30),
        "set_per_process_memory_fraction": told.fractions.append,
        "max_memory_allocated": lambda: MIB,
        "max_memory_reserved": lambda: 2 * MIB,
        "memory_stats": lambda: {"num_alloc_retries": 0},
    }
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: told.recording.append(options)
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [trace]})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.settings.append)
    return told


SMALL = {"case": "lenet5", "micro_batch": 4, "precision": "fp32", "device": "cpu"}


def test_a_measurement(played_gpu: SimpleNamespace) -> None:
    answer = HANDLERS["measure"](setting=SMALL, limit_bytes=8 * 2**30, timed=True)
    assert (answer["allocated_bytes"], answer["reserved_bytes"], answer["retries"]) == (MIB, 2 * MIB, 0)
    assert answer["samples_per_second"] == pytest.approx(4 / answer["step_seconds"])
    assert answer["first_step_seconds"] > 0 and json.dumps(answer)
    HANDLERS["measure"](setting=SMALL)
    assert played_gpu.fractions == [0.1, 1.0], "a limit is not left to the next one"


def test_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HANDLERS["estimate"](setting=SMALL) == {}, "a CPU is not in the catalogue"
    monkeypatch.setattr(step_estimate, "gpu_of_hardware", lambda _: gpu_of("h100-80g"))
    found = HANDLERS["estimate"](setting=SMALL)
    assert 0 < found["fastest_seconds"] < found["slowest_seconds"] < 0.1
    assert found["bound"] == "launching kernels" and json.dumps(found)


@pytest.mark.parametrize(("expandable", "reserved"), [(True, 40 * MIB), (False, 22 * MIB)])
def test_a_history(played_gpu: SimpleNamespace, expandable: bool, reserved: int) -> None:
    answer = HANDLERS["history"](setting=SMALL, expandable=expandable)
    assert played_gpu.settings == [f"expandable_segments:{expandable}"], "as it is replayed"
    assert (answer["simulated_allocated_bytes"], answer["simulated_reserved_bytes"]) == (22 * MIB, reserved)
    assert (answer["allocated_bytes"], answer["reserved_bytes"], answer["events"]) == (MIB, 2 * MIB, 2)
    assert played_gpu.recording[-1] == {"enabled": None} and json.dumps(answer)


def test_choices_and_predictions_are_told() -> None:
    answer = HANDLERS["choose"](setting=SMALL, free_bytes=[10 * 10**9, 20 * 10**9], most=256)
    assert answer == {"table": [16, 32], "predicted": [256, 256]}
    one, two = (HANDLERS["predict"](setting={**SMALL, "micro_batch": size}) for size in (4, 64))
    assert one["peak_bytes"] == sum(one["parts"].values()) < two["peak_bytes"] and json.dumps(one)


def test_predictions_choose_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sample takes 100 MiB, 2 % are added and a fifth of the memory is left to other programs."""
    monkeypatch.setattr(
        trials, "predicted_parts", lambda opened: {"all": opened.plan.micro_batch * 100 * MIB}
    )
    answer = HANDLERS["choose"](setting=SMALL, free_bytes=[4 * 2**30, 2**30, 2**26], most=256)
    assert answer["predicted"] == [32, 8, 0]


@pytest.mark.parametrize("case", ["lenet5", "gpt2"])
def test_lightning_is_given_what_we_train(
    case: str, played_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tuner:
        def __init__(self, trainer: Any) -> None:
            assert trainer.precision == "32-true"

        def scale_batch_size(self, module: Any, *, datamodule: Any, mode: str) -> int:
            datamodule.batch_size = 3
            batch = next(iter(datamodule.train_dataloader()))
            assert len(batch[0]) == len(batch[1]) == 3 and mode == "power"
            torch.autograd.backward(module.training_step(batch, 0))
            module.configure_optimizers().step()
            return 3

    lightning = SimpleNamespace(
        __version__="1",
        LightningModule=torch.nn.Module,
        LightningDataModule=object,
        Trainer=lambda **options: SimpleNamespace(**options),
    )
    monkeypatch.setattr(trials, "installed", lambda: "played")
    monkeypatch.setitem(sys.modules, "played", lightning)
    monkeypatch.setitem(sys.modules, "played.tuner", SimpleNamespace(Tuner=Tuner))
    tiny = {"CONFIG_GPT2_SIZE_TINY": "y"} if case == "gpt2" else {}
    dataset = partial(random_text, 16, vocab_size=64) if case == "gpt2" else CASES[case].dataset
    small = dataclasses.replace(CASES[case], settings=CASES[case].settings | tiny, dataset=dataset)
    monkeypatch.setattr(cases, "CASES", {case: small})
    setting = {**SMALL, "case": case, "any_batch": True}
    answer = HANDLERS["lightning"](setting=setting, mode="power", limit_bytes=40 * 2**30)
    assert (answer["batch"], answer["version"]) == (3, "1") and played_gpu.fractions == [0.5]
