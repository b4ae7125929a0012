"""Two frozen models on two devices: nothing is where it does not belong, and nothing comes out otherwise.

A processor is one device. What stands for two are tensors without contents, which say where they are and
refuse an operation on two devices, or a copy to "cpu:0", which autograd sees as one.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib import kconf
from lib.data.datasets.question_answering.spec import AnswerSpec
from lib.data.loader import Batch
from lib.devices.backend import open_backend
from lib.devices.base import Backend, SimulatedBackend
from lib.memory.live import LiveBytes
from lib.memory.simulation import simulation
from lib.nn import activation_offload
from lib.plan import plan as make_plan
from lib.plan.gpus import parse_gpu
from lib.plan.types import Layout
from tests.contract.plan_facts import config_of, facts_of
from tests.models.latentwire.answers import answer_set, answers_data, small_bridge_config
from tests.support.configs import ROOT
from tests.support.training import CPU, CPU_TRIAL, small_job, small_plan
from train import commands
from train.job import Job, Progress, evaluate
from train.loop import accumulate_gradients
from train.planning.memory_estimate import MemoryTraces
from train.tasks.bridge import task as bridge
from train.tasks.bridge.frozen import FrozenSource
from train.tasks.bridge.task import Bridge, _Share

SPLIT = Layout(strategy="split", world=1, shard=1, branch_devices=(1, 1))
SEQUENTIAL = Layout(strategy="sequential", world=1, shard=1)
# Devices of which not even a number may be on another. Autograd runs on them without a driver.
FIRST, SECOND = torch.device("lazy", 0), torch.device("lazy", 1)
ROWS, LATENTS = 3, 2


def bridge_on(*devices: torch.device) -> tuple[Bridge, list[Tensor], Batch]:
    """A bridge with its models on these, and prefixes and a batch on the first."""
    spec = answer_set(4, 2).spec
    assert isinstance(spec, AnswerSpec)
    sources = [FrozenSource(side, None) for side in spec.sides]
    first, second = (each.load(device, torch.float32) for each, device in zip(sources, devices, strict=True))
    home = devices[0]
    prefixes = [
        torch.zeros(ROWS, LATENTS, side.width, device=home, requires_grad=True) for side in spec.sides
    ]
    batch = Batch(
        torch.zeros(ROWS, spec.source_bytes, dtype=torch.int64, device=home),
        torch.zeros(ROWS, sum(spec.columns), dtype=torch.int64, device=home),
        torch.ones(ROWS, device=home),
    )
    return Bridge(spec, ((first,), (second,)), first_token_weight=0.5), prefixes, batch


def trained_and_evaluated(task: Bridge, prefixes: list[Tensor], batch: Batch) -> None:
    sums = task.training(lambda _: prefixes, batch)
    sums.loss.backward()
    with torch.no_grad():
        evaluated = task.evaluation(lambda _: prefixes, batch)
    found = [sums.loss, *sums.metrics.values(), evaluated.loss, *evaluated.metrics.values()]
    found += [prefix.grad for prefix in prefixes if prefix.grad is not None]
    assert len(found) == 2 + 2 + 10 + 2 and {each.device for each in found} == {FIRST}


@pytest.mark.slow
def test_all_is_where_it_belongs() -> None:
    with simulation("cpu"):
        task, prefixes, batch = bridge_on(FIRST, SECOND)
        for lm, device in zip(task.frozen, (FIRST, SECOND), strict=True):
            assert {each.device for each in [lm.embedding_rms, *lm.weights()]} == {device}
        trained_and_evaluated(task, prefixes, batch)


def answers_left(copies: Any, *tensors: Tensor) -> Any:
    return [_Share(copies[0], (tensors[0].to(copies[0].device), *tensors[1:]))]


LEFT_BEHIND: dict[str, Any] = {
    "tokens": lambda _: mock.patch.object(bridge, "_shared", answers_left),
    "prefix": lambda _: mock.patch.object(bridge._Copy, "device", property(lambda _: FIRST)),
    "loudness": lambda task: mock.patch.object(task.frozen[1], "embedding_rms", torch.ones((), device=FIRST)),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LEFT_BEHIND)
def test_what_is_left_on_the_wrong_device_is_found(what: str) -> None:
    with simulation("cpu"):
        task, prefixes, batch = bridge_on(FIRST, SECOND)
        with LEFT_BEHIND[what](task), pytest.raises(RuntimeError, match=r"same device.*lazy:"):
            trained_and_evaluated(task, prefixes, batch)


class Seen(TorchDispatchMode):
    """The operations, with the device of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, torch.device | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        device = result.device if isinstance(result, Tensor) else None
        self.operations.append((func._overloadpacket.__name__, device))
        return result


@pytest.mark.slow
def test_neither_device_waits_for_the_other_to_answer() -> None:
    with simulation("cpu"):
        task, prefixes, batch = bridge_on(FIRST, SECOND)
        with Seen() as seen:
            task.training(lambda _: prefixes, batch)

    def places(name: str, device: torch.device) -> list[int]:
        return [number for number, found in enumerate(seen.operations) if found == (name, device)]

    out, read = places("_to_copy", SECOND), places("embedding", FIRST)
    assert out and read and max(out) < min(read), "a copy waits for what its device was given before"
    answered = [*places("addmm", FIRST), *places("addmm", SECOND)]
    # A loss and a figure; the third is the prediction's comparison, none of which comes back earlier.
    assert answered and max(answered) < min(places("_to_copy", FIRST)[-2:])


def gradients(job: Job) -> dict[str, Tensor]:
    list(accumulate_gradients(job, Progress()))
    return {name: weight.grad for name, weight in job.model.named_parameters() if weight.grad is not None}


LAYOUTS: dict[str, dict[str, Any]] = {
    "model_split": {"strategy": "split"},
    "hybrid_3gpu": {"strategy": "split", "branch_devices": (2, 1)},
    "hybrid_4gpu": {"strategy": "split", "branch_devices": (2, 2)},
    "more devices than samples": {"strategy": "split", "branch_devices": (1, 6)},
    "sequential_models": {"strategy": "sequential"},
}


@pytest.mark.slow
def test_gradients_are_those_of_one_device() -> None:
    """In double precision, with copies that autograd takes back."""
    config = small_bridge_config()
    data = answers_data(config, train=12, test=7)
    one = small_job(config, small_plan(8), data)
    whole, evaluated = gradients(one), evaluate(one)
    largest = max(float(each.abs().max()) for each in whole.values())
    elsewhere = mock.patch.object(bridge._Copy, "device", property(lambda _: torch.device("cpu", 0)))
    for name, layout in LAYOUTS.items():
        with elsewhere:
            plan = small_plan(5, 3, **layout)
            backend = Backend("cpu", devices=plan.layout.devices_per_process)
            job = small_job(config, plan, data, backend=backend)
            parted = gradients(job)
            found = evaluate(job)
        assert whole.keys() == parted.keys() and largest > 0, name
        furthest = max(float((whole[weight] - parted[weight]).abs().max()) for weight in whole)
        assert furthest <= 1e-12 * largest, name
        assert found == pytest.approx(evaluated, rel=1e-12), name


@pytest.mark.slow
def test_one_frozen_model_at_a_time_is_on_the_device() -> None:
    """Its weights are there while it reads, and gone before the other's come."""
    present: list[int] = []
    home, host = torch.device("cpu"), torch.device("cpu", 1)
    spec = answer_set(4, 2).spec
    assert isinstance(spec, AnswerSpec)
    with simulation("cpu"), LiveBytes() as live:
        frozen = [FrozenSource(side, None).load(host, torch.float32) for side in spec.sides]
        sizes = [sum(weight.nbytes for weight in {id(w): w for w in lm.weights()}.values()) for lm in frozen]
        prefixes = [torch.zeros(ROWS, LATENTS, side.width, requires_grad=True) for side in spec.sides]
        columns = torch.zeros(ROWS, sum(spec.columns), dtype=torch.int64)
        batch = Batch(torch.zeros(ROWS, spec.source_bytes).long(), columns, torch.ones(ROWS))
        for lm in frozen:
            lm.wait_for(home)
        task = Bridge(spec, ((frozen[0],), (frozen[1],)), first_token_weight=0.5)
        copied: list[list[weakref.ref[Tensor]]] = []

        def seen(weights: list[Tensor]) -> None:
            present.append(sum(ref() is not None for refs in copied for ref in refs))
            assert {weight.device for weight in weights} == ({home} if started else {host})
            if started:
                copied.append([weakref.ref(weight) for weight in weights])

        started = False
        task.watch_weights(seen)
        started, before = True, live.trace(home).peak_bytes
        sums = task.training(lambda _: prefixes, batch)
        sums.loss.backward()
        with torch.no_grad():
            task.evaluation(lambda _: prefixes, batch)
        del before
        assert present == [0] * 6 and all(weight.device == host for lm in frozen for weight in lm.weights())
        assert all(prefix.grad is not None for prefix in prefixes)
        assert live.trace(home).peak_bytes < sum(sizes)


@pytest.mark.slow
def test_a_job_needs_as_many_devices_as_its_plan_has() -> None:
    config = small_bridge_config()
    data = answers_data(config, train=12, test=2)
    with pytest.raises(AssertionError, match="split"):
        small_job(config, small_plan(4, strategy="split"), data)
    with pytest.raises(AssertionError, match="single"):
        small_job(config, small_plan(4), data, backend=Backend("cpu", devices=2))


class Opened(Exception):
    """With how many devices."""


def test_a_process_that_was_launched_takes_the_devices_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **given: Any) -> Backend:
        raise Opened(given["world"], given["devices"])

    monkeypatch.setattr(commands, "open_backend", opened)
    monkeypatch.setattr(commands, "open_training_data", lambda *_, **__: None)
    resolved = kconf.load(root=ROOT, config_file=ROOT / "defconfigs/latentwire-tiny", overrides={})
    for strategy, expected in (("split", (2, 2)), ("ddp", (2, 1))):
        launched = {
            "configuration": resolved.to_json(),
            "plan": small_plan(4, world=2, strategy=strategy).to_json(),
            "hardware": CPU.to_json(),
        }
        monkeypatch.setattr(commands, "become_worker", lambda launched=launched: launched)
        with pytest.raises(Opened) as found:
            commands.work(root=ROOT, runs=ROOT, started=0.0)
        assert found.value.args == expected


def test_processes_have_pairs_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    second = Backend("cuda", rank=1, world=2, local_rank=1, devices=2)
    assert second.devices == (torch.device("cuda", 2), torch.device("cuda", 3))
    assert second.device == torch.device("cuda", 2) and chosen == [second.device]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + device.index)
    assert second.peak_memory_bytes() == 103
    assert open_backend("cuda", world=1, devices=2).devices == tuple(torch.device("cuda", n) for n in (0, 1))
    assert len(SimulatedBackend("cuda", averages_gradients=False).devices) == 1


@pytest.mark.long
def test_the_fuller_device_is_predicted() -> None:
    """Weights and optimizer are on the first, with the larger of the two models."""
    config = small_bridge_config(
        optimizer="adamw", adam_beta1=0.9, adam_beta2=0.99, adam_eps=1e-8, momentum=None
    )
    data = answers_data(config)
    branches = data.facts.branches
    assert branches is not None and branches[0].parameters > branches[1].parameters
    alone = dataclasses.replace(CPU_TRIAL, accumulates=False)
    found = MemoryTraces(config, data)
    both, one = (found.of(dataclasses.replace(alone, layout=layout), CPU) for layout in (None, SPLIT))
    whole, parted = both.trace.at_peak(), one.trace.at_peak()
    sizes = [4 * branch.parameters for branch in branches]
    assert whole["frozen models"] == sum(sizes) and parted["frozen models"] == sizes[0]
    assert all(whole[name] == parted[name] for name in ("parameters", "optimizer"))
    assert parted["activations"] < 0.7 * whole["activations"]
    # The estimate counts the same work: for each sample what is trained and the model beside it.
    known = alone.micro_batch * (data.facts.flop_per_sample or 0)
    assert one.step_flop == pytest.approx(known + 8 * branches[0].flop_per_sample, rel=0.05)
    assert both.step_flop == pytest.approx(
        known + 8 * sum(each.flop_per_sample for each in branches), rel=0.05
    )
    pairs = dataclasses.replace(alone, layout=dataclasses.replace(SPLIT, world=4))
    assert found.of(pairs, CPU) is one, "of one of the pairs"
    hybrid, waiting = (
        found.of(dataclasses.replace(alone, layout=layout), CPU).trace.at_peak()
        for layout in (dataclasses.replace(SPLIT, branch_devices=(2, 1)), SEQUENTIAL)
    )
    assert hybrid["frozen models"] in sizes and hybrid["activations"] < parted["activations"]
    assert waiting["frozen models"] in sizes, "one at a time, and its kind is known"
    assert waiting["activations"] < 0.7 * whole["activations"]
    half = dataclasses.replace(alone, device="cuda", precision="bf16", layout=SPLIT)
    in_half = found.of(half, CPU).trace.at_peak()
    assert in_half["frozen models"] < 0.55 * parted["frozen models"]
    away = MemoryTraces(config.replace(activation_offload=True), data)
    with mock.patch.object(activation_offload, "SMALLEST_BYTES", 1024):
        assert away.of(half, CPU).trace.at_peak().get("activations", 0) < in_half["activations"]


def test_a_model_with_frozen_ones_is_offered_it() -> None:
    requested = kconf.load(
        root=ROOT,
        config_file=ROOT / "defconfigs/latentwire-tiny",
        overrides={"CONFIG_DIST_STRATEGY_SPLIT": "y"},
    )
    assert requested.values["DIST_STRATEGY"] == "split"


def test_a_run_of_two_small_models_has_the_same_layouts() -> None:
    """Of LatentWire's own models, whose bytes were recorded."""
    config = config_of("latentwire-tiny").replace(
        elastic_policy="latentwire", elastic_base_batch=64, elastic_target_util=75
    )
    facts = facts_of("latentwire-tiny")
    assert facts.branches is not None and all(each.bytes_per_sample > 0 for each in facts.branches)
    for count, layout in ((2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (5, ())):
        assert make_plan(config, parse_gpu(f"rtx3090x{count}"), facts).branch_devices == layout
