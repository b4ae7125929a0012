"""Two frozen models on two devices: nothing is where it does not belong, and nothing comes out otherwise.

A processor is one device. What stands for two are tensors without contents, which say where they are and
refuse an operation on two devices, or a copy to "cpu:0", which autograd sees as one.
"""

from __future__ import annotations

import dataclasses
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
from lib.memory.simulation import simulation
from lib.nn import activation_offload
from lib.plan.types import Layout
from tests.models.latentwire.answers import answer_set, answers_data, small_bridge_config
from tests.support.configs import ROOT
from tests.support.training import CPU, CPU_TRIAL, small_job, small_plan
from train import commands
from train.job import Job, Progress
from train.loop import _accumulate
from train.planning.memory_estimate import MemoryTraces
from train.tasks.bridge import task as bridge
from train.tasks.bridge.frozen import FrozenSource
from train.tasks.bridge.task import Bridge

SPLIT = Layout(strategy="split", world=1, shard=1)
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
    return Bridge(spec, (first, second), first_token_weight=0.5), prefixes, batch


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


def columns_left(self: Bridge, targets_BN: Tensor) -> Any:
    answer_a, text_a, answer_b, text_b, others = targets_BN.split(list(self._spec.columns), dim=1)
    return (answer_a, answer_b), (text_a, text_b), others


LEFT_BEHIND: dict[str, Any] = {
    "tokens": lambda _: mock.patch.object(Bridge, "_columns", columns_left),
    "prefix": lambda _: mock.patch.object(bridge._Branch, "device", property(lambda _: FIRST)),
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
    list(_accumulate(job, Progress()))
    return {name: weight.grad for name, weight in job.model.named_parameters() if weight.grad is not None}


@pytest.mark.slow
def test_gradients_are_those_of_one_device() -> None:
    """In double precision, with copies that autograd takes back."""
    config = small_bridge_config()
    data = answers_data(config, train=12, test=2)
    whole = gradients(small_job(config, small_plan(8), data))
    elsewhere = mock.patch.object(bridge._Branch, "device", property(lambda _: torch.device("cpu", 0)))
    with elsewhere:
        backend = Backend("cpu", devices=2)
        job = small_job(config, small_plan(4, 4, strategy="split"), data, backend=backend)
        parted = gradients(job)
    largest = max(float(each.abs().max()) for each in whole.values())
    assert whole.keys() == parted.keys() and largest > 0
    assert all(float((whole[name] - parted[name]).abs().max()) <= 1e-12 * largest for name in whole)


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


@pytest.mark.slow
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
