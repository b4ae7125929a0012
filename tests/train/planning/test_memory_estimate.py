"""What a run is said to need of memory is what its own steps take."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

from lib.devices.host import ALLOCATOR_VARIABLES
from lib.memory import fake_mode
from lib.memory.allocator import LARGE_SEGMENT, MIB
from lib.memory.live import Trace
from lib.plan.fitting import GAPS, StepSettings, plan_of
from lib.plan.types import Kind, Layout
from tests.support.configs import load_hardware
from tests.support.datasets import looked
from tests.support.examples import examples
from tests.support.training import CPU, CPU_TRIAL, data_of, small_config
from train.planning import memory_estimate
from train.planning.memory_estimate import (
    MemoryTraces,
    fullest,
    trace_memory,
    with_gaps,
)
from train.training_data import TrainingData, make_training_data

pytestmark = pytest.mark.slow

TRIAL = CPU_TRIAL
# Those of the plug-ins that learn from images, too.
IMAGE_MODELS = [name for name, example in examples().items() if not hasattr(example, "data")]


def at_peak(config: Any, trial: StepSettings, data: TrainingData) -> Mapping[str, int]:
    return trace_memory(config, plan_of(trial), data, hardware=CPU).trace.at_peak()


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ("lenet5", "none"),
        ("resnet18", "blocks"),
        ("resnet18", "none"),
        pytest.param("resnet50", "none", marks=pytest.mark.long),
        ("gpt2", "none"),
        ("gpt2", "all"),
        ("resnet_bk", "none"),
        ("resnet_bk", "blocks"),
        *((name, "none") for name in IMAGE_MODELS),
    ],
)
def test_without_contents_a_step_takes_what_it_takes_with_them(model: str, recompute: str) -> None:
    config = small_config(
        model,
        grad_checkpoint=recompute,
        optimizer="adamw",
        augment="none",
        data_placement="stream",
        ema=True,
        ema_decay=0.99,
        grad_clip=1.0,
    )
    trial = dataclasses.replace(TRIAL, norm_batch=4 if model in ("resnet18", "resnet50") else 0)
    data = data_of(config)
    found = dict(at_peak(config, trial, data))
    with mock.patch.object(memory_estimate, "simulation", lambda _: contextlib.nullcontext()):
        threads = torch.get_num_threads()
        real = dict(at_peak(config, trial, data))
        torch.set_num_threads(threads)
    # Real rows come in NumPy's memory, which no operation of torch has made. Images are gone once they are
    # normalised, tokens stay for the embedding; targets of a text are seen when they are flattened.
    inputs, targets = data.dataset.train.take(np.zeros(TRIAL.micro_batch, np.int64))
    found["activations"] -= (targets if config.block_size is None else inputs).nbytes
    assert found == real


def test_mixed_pairs_are_in_the_prediction() -> None:
    """It runs the step that augments samples and partners: the memory is that of a real one."""
    launches = []
    for alpha in (0.0, 0.8):
        config = small_config(
            "lenet5",
            augment="resized_crop",
            augment_crop_pct=50,
            augment_contrast=0.4,
            augment_mixup_alpha=alpha,
            augment_cutmix_alpha=alpha,
            data_placement="stream",
        )
        data = data_of(config)
        found = trace_memory(config, plan_of(TRIAL), data, hardware=CPU)
        with mock.patch.object(memory_estimate, "simulation", lambda _: contextlib.nullcontext()):
            threads = torch.get_num_threads()
            real = trace_memory(config, plan_of(TRIAL), data, hardware=CPU)
            torch.set_num_threads(threads)
        apart = found.trace.at_peak()["activations"] - real.trace.at_peak()["activations"]
        assert apart == (0 if alpha else 8 * TRIAL.micro_batch), "real labels come in NumPy's memory"
        assert found.launches == real.launches
        launches.append(found.launches)
    assert launches[0].forward < launches[1].forward and launches[0].backward < launches[1].backward


def torn() -> Trace:
    """200 MiB, then ten times 20 in their place, of which every second one goes before 60 are wanted."""
    whole = [(0, 200), (0, -200), *((n, 20) for n in range(2, 12)), *((n, -20) for n in range(2, 12, 2))]
    events = tuple((number, mib * MIB) for number, mib in [*whole, (12, 60)])
    return Trace(events, {}, {}, 512)


@pytest.mark.parametrize(
    ("device", "variables", "gaps"),
    [
        ("cuda", {}, 0),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, 60),
        ("cuda", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, 60),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 60),
        ("rocm", {}, 60),  # whose runs keep the default of torch
    ],
)
def test_gaps_are_those_of_the_allocator_as_it_will_be_set(
    device: Any, variables: dict[str, str], gaps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = with_gaps(torn(), device)
    assert found["temporaries"] == 200 * MIB and found[GAPS] == pytest.approx(gaps * MIB, abs=MIB)


@pytest.mark.slow
def test_cuda_and_rocm_share_traces_and_not_gaps() -> None:
    config = small_config(optimizer="adamw", data_placement="stream")
    traces, kinds = MemoryTraces(config, data_of(config)), ("rocm", "cuda")
    own = mock.Mock(side_effect=lambda _, device, *__, **___: {device: 1})
    with mock.patch.object(memory_estimate, "with_gaps", own):
        found = [traces.predictor(CPU)(dataclasses.replace(TRIAL, device=kind)) for kind in kinds]
    assert [next(iter(parts)) for parts in found] == ["rocm", "cuda"]


def test_gaps_are_left_out_where_nobody_asks_for_them() -> None:
    config = small_config(optimizer="adamw", data_placement="stream")
    traces = MemoryTraces(config, data_of(config))
    trial = dataclasses.replace(TRIAL, device="cuda")
    without, full = (traces.predictor(CPU, gaps=each)(trial) for each in (False, True))
    assert GAPS in full and without == {name: size for name, size in full.items() if name != GAPS}


def test_each_choice_shows_where_it_should() -> None:
    config = small_config("gpt2", optimizer="adamw", ema=True, ema_decay=0.99)
    config = config.replace(block_size=64)
    data = data_of(config)
    parameters = 4 * (data.facts.parameters or 0)

    def found(trial: StepSettings = TRIAL, **changes: object) -> Mapping[str, int]:
        return at_peak(config.replace(**changes), trial, data)

    plain = found()
    assert plain["optimizer"] == pytest.approx(2 * parameters, rel=0.02)
    assert plain["averages"] == plain["parameters"] == parameters
    assert plain["gradients"] == parameters, "those of the first micro-batch"
    assert "averages" not in found(ema=False)
    assert found(optimizer="sgd", momentum=0.9)["optimizer"] == parameters
    wide = {"model_options": {**config.model_options, "width": 128}}
    eight = found(adam_8bit=True, **wide)["optimizer"] / found(**wide)["optimizer"]
    assert 2.03 / 8 < eight < 0.27, "weights of few values have it in full"
    alone = dataclasses.replace(TRIAL, accumulates=False)
    assert sum(found(alone).values()) < sum(plain.values())
    several = dataclasses.replace(alone, several_devices=True)
    assert sum(found(several).values()) - sum(found(alone).values()) == pytest.approx(parameters, rel=0.15)
    assert found(grad_checkpoint="blocks")["activations"] < 0.7 * plain["activations"]
    half = dataclasses.replace(TRIAL, precision="bf16", device="cuda")
    whole = dataclasses.replace(TRIAL, device="cuda")
    assert found(half)["activations"] < 0.75 * found(whole)["activations"]


class Strict(fake_mode.QuickFakeMode):
    """Refuses what it would have to compute, and remembers nothing."""

    _known: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.allow_fallback_kernels = False
        self._known.clear()


@pytest.mark.parametrize(
    ("model", "optimizer"), [("lenet5", "sgd"), ("gpt2", "muon"), ("resnet_bk", "adamw")]
)
def test_nothing_is_computed_on_tensors_of_full_size(model: str, optimizer: str) -> None:
    """Where torch cannot tell the shapes of an operation it runs it on zeros, unless that is forbidden."""
    defaults = {
        "momentum": 0.9,
        "muon_learning_rate": 0.02,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "adam_eps": 1e-8,
    }
    config = small_config(model, optimizer=optimizer, **defaults, data_placement="stream")
    with mock.patch.object(fake_mode, "QuickFakeMode", Strict):
        assert at_peak(config, dataclasses.replace(TRIAL, device="cuda"), data_of(config))


def test_a_checkpoint_beside_training_is_a_copy_in_main_memory() -> None:
    config = small_config("lenet5", optimizer="adamw", ema=True, ema_decay=0.99)
    data = data_of(config)

    def found(device: Kind, *, aside: bool) -> Mapping[str, int]:
        memory_traces = MemoryTraces(config.replace(checkpoint_async=aside), data)
        hardware = CPU if device == "cpu" else load_hardware("rtx3090")
        return memory_traces.predictor(hardware)(dataclasses.replace(TRIAL, device=device))

    waiting, aside = found("cpu", aside=False), dict(found("cpu", aside=True))
    parameters = 4 * (data.facts.parameters or 0)
    assert aside.pop("checkpoint") == pytest.approx(4 * parameters, rel=0.01), "with averages and two moments"
    assert aside == waiting
    assert found("cuda", aside=True) == found("cuda", aside=False), "the device has nothing of it"
    step = dataclasses.replace(TRIAL, device="cpu", layout=Layout(strategy="fsdp", world=2, shard=2))
    for form, share in {"full": 1.0, "sharded": 0.5}.items():
        traces = MemoryTraces(config.replace(checkpoint_async=True, checkpoint_format=form), data)
        copied = traces.predictor(CPU)(step)["checkpoint"]
        assert copied == pytest.approx(share * 4 * parameters, rel=0.02), form


def test_a_gpu_loses_memory_between_tensors() -> None:
    config = small_config("resnet18")
    memory_traces = MemoryTraces(config, data_of(config))
    on_cpu, on_gpu = (
        memory_traces.predictor(hardware)(dataclasses.replace(TRIAL, device=device))
        for device, hardware in (("cpu", CPU), ("cuda", load_hardware("rtx3090")))
    )
    assert GAPS not in on_cpu
    tensors = sum(size for name, size in on_gpu.items() if name != GAPS)
    # Little is trained here, and segments of 20 MiB are much for it.
    assert on_gpu[GAPS] > 0 and tensors + on_gpu[GAPS] < 1.5 * tensors + 2 * LARGE_SEGMENT


def test_the_fullest_device_is_the_one_that_needs_most_gaps_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")

    def trace(*byte_counts: int) -> Trace:
        held = [(number, MIB * count) for number, count in enumerate(byte_counts)]
        halves = [(number, -MIB * byte_counts[number]) for number in range(0, len(held) - 1, 2)]
        return Trace((*held[:-1], *halves, held[-1]), {})

    whole, torn = trace(42), trace(5, 5, 5, 5, 5, 5, 5, 5, 6)  # half of each segment stays in use
    assert torn.peak_bytes < whole.peak_bytes
    assert fullest([whole, torn], "cuda") is torn and fullest([whole, torn], "cpu") is whole


def test_a_set_that_nobody_opened_is_enough_and_data_on_the_device_count() -> None:
    config = small_config("resnet18", dataset="cifar10")
    dataset = looked("cifar10")
    assert dataset is not None and (dataset.train.size, dataset.test.size) == (50_000, 10_000)
    memory_traces = MemoryTraces(config, make_training_data(config, dataset))
    found = memory_traces.predictor(CPU)(TRIAL)
    assert found["data"] >= 60_000 * 3 * 32 * 32
    streamed = MemoryTraces(config.replace(data_placement="stream"), make_training_data(config, dataset))
    without = streamed.predictor(CPU)(TRIAL)
    assert without.get("data", 0) < 1e6
    # They lie there from before the model to after the last step.
    on_the_device = {name: size - without.get(name, 0) for name, size in found.items() if name != "data"}
    assert set(on_the_device.values()) == {0} and set(without) - {"data"} == set(on_the_device)


def test_what_is_found_once_is_not_looked_for_again() -> None:
    config = small_config("lenet5")
    memory_traces = MemoryTraces(config, data_of(config))
    first = memory_traces.of(TRIAL, CPU)
    predict, on_gpu = memory_traces.predictor(CPU), dataclasses.replace(TRIAL, device="cuda")
    parts = predict(on_gpu)
    with (
        mock.patch.object(memory_estimate, "trace_memory", side_effect=AssertionError),
        mock.patch("lib.memory.allocator.least_capacity", side_effect=AssertionError),
    ):
        assert memory_traces.of(TRIAL, CPU) is first
        assert predict(on_gpu) == parts
    # A convolution of K x K and C channels to H x W x D takes 2 K K C H W D, forwards; LeNet-5 on 8 images.
    forward = 2 * 8 * (25 * 28 * 28 * 6 + 25 * 6 * 10 * 10 * 16 + 400 * 120 + 120 * 84 + 84 * 10)
    first_layer = 2 * 8 * 25 * 28 * 28 * 6  # nobody wants the gradient of the images
    assert first.step_flop == 2 * (3 * forward - first_layer), (
        "two micro-batches, forwards and twice backwards"
    )
