"""What `make plan` says of a step: its arithmetic, its bytes, and what it advises."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lib import kconf
from lib.config import CompileOptions, Config
from lib.devices.host import ALLOCATOR_VARIABLES
from lib.errors import ConfigError, PlanError
from lib.nn.activation_checkpointing import Recompute, configure_recomputation
from lib.plan import roofline
from lib.plan.fitting import NoRoomError, StepSettings
from lib.plan.gpus import CATALOGUE, parse_gpu
from lib.plan.roofline import BANDWIDTH_SHARES
from lib.plan.types import Hardware, Memory
from lib.units import bytes_text
from tests.support.outlooks import BATCH, outlook, short_of_memory
from tests.support.tokens import BLOCK, cycle, text_data
from tests.support.training import random_data, small_config
from train.planning.changes import _LORA, further_changes
from train.planning.command import (
    _compare,
    _lines,
    _rank,
    look_ahead,
    plan,
    what_would_fit,
)
from train.planning.memory_estimate import MemoryTraces
from train.training_data import TrainingData, make_training_data

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_the_cut_changes_neither_arithmetic_nor_steps() -> None:
    whole, cut = outlook("h100-80g", BATCH), outlook("h100-80g", 8)
    ragged = outlook("h100-80g", 9, compile="manual", compile_model=False)
    assert (whole.plan.accumulation, cut.plan.accumulation) == (1, 8)
    assert whole.step_flop == cut.step_flop == ragged.step_flop and ragged.plan.last_micro_batch == 1
    assert whole.steps_per_epoch == cut.steps_per_epoch == 10
    assert "10 optimizer steps an epoch" in _lines(whole)


@pytest.mark.slow
def test_bytes_of_a_step_are_those_of_all_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "LAUNCH_SECONDS", {False: (0.0, 0.0), True: (0.0, 0.0)})
    found = outlook("h100-80g", 8)
    assert found.plan.memory is not None and found.step_time is not None
    parts = found.plan.memory.parts
    weights, state, activations = parts["parameters"], parts["optimizer"], parts["activations"]
    # Weights twice a micro-batch, gradients two times but once, and the update (`StepWork`).
    moved = (2 * 8 + 2) * weights + 2 * 8 * weights + 2 * state + 2 * 8 * activations
    assert found.step_time.bound == "memory"
    assert found.step_time.fastest_seconds == pytest.approx(moved / (3.35e12 * BANDWIDTH_SHARES[1]), rel=1e-3)


@pytest.mark.slow
def test_the_table_of_strategies_has_the_time_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic is the traced one, in which attention is computed again."""
    monkeypatch.setattr(roofline, "LAUNCH_SECONDS", {False: (0.0, 0.0), True: (0.0, 0.0)})
    monkeypatch.setattr(roofline, "BANDWIDTH_SHARES", (1e6, 1e6))
    config = small_config("gpt2", precision="bf16", target_effective_batch=64)
    data = text_data(config, train=cycle(80 * BLOCK))
    found = look_ahead(config, data, parse_gpu("h100-80gx3"), MemoryTraces(config, data))
    (chosen,) = [each for each in found.strategies if each.verdict == "chosen"]
    assert found.step_time is not None and found.step_time.bound == "arithmetic"
    assert chosen.seconds == pytest.approx((found.step_time.fastest_seconds, found.step_time.slowest_seconds))


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "advised"), [("p100-16g", False), ("rtx3060-12g", True)])
def test_only_what_the_device_can_do_is_advised(gpu: str, advised: bool) -> None:
    found = short_of_memory(gpu, BATCH, precision="fp32", optimizer="adamw")
    assert any("PRECISION_BF16" in line for line in found.alternatives) == advised
    assert any("OPTIMIZER_SGD" in line for line in found.alternatives)
    (told,) = [line for line in _lines(found) if "figures of the device" in line]
    assert told.endswith(CATALOGUE[gpu].origin)
    assert ("by our own estimate" in told) == bool(CATALOGUE[gpu].estimated)


@pytest.mark.slow
def test_what_would_fit_is_planned() -> None:
    config = small_config("gpt2", target_effective_batch=4, optimizer="adamw", auto_method="predict")
    wide = {**config.model_options, "width": 512}
    config = config.replace(initial_weights="base.safetensors", model_options=wide)  # a plan opens no file
    data, machine = text_data(config), parse_gpu("rtx3090")

    def need_bytes(changed: Config) -> int:
        own = make_training_data(changed, data.dataset)
        found = look_ahead(changed, own, machine, MemoryTraces(changed, own), alternatives=False).plan.memory
        assert found is not None
        return found.need_bytes

    adapted = config.replace(adapt="lora", **_LORA)
    least = need_bytes(adapted.replace(batch_size=1, hyper_param="manual", gradient_accumulation=0))
    device = dataclasses.replace(machine.devices[0], free_bytes=least)
    small = dataclasses.replace(machine, devices=(device,))
    with pytest.raises(NoRoomError) as caught:
        look_ahead(config, data, small, MemoryTraces(config, data))
    lines = list(what_would_fit(config, data, small, caught.value, root=ROOT))
    (lora,) = [line for line in lines if line.startswith("CONFIG_ADAPT_LORA=y (")]
    assert f": 1 x 4, {bytes_text(least)} of {bytes_text(least)} usable, " in lora
    assert lora.endswith(" a step")
    options: dict[str, Any] = {"precision": "bf16", "recompute": "none"}
    names = [change.name for change in further_changes(config, small, **options)]
    eight, lora_at = (next(n for n, name in enumerate(names) if each in name) for each in ("8BIT", "LORA"))
    assert eight < lora_at and any("CONFIG_ADAM_8BIT=y" in line for line in lines)
    done = further_changes(config.replace(adam_8bit=True), small, **options)
    assert not [change for change in done if "8BIT" in change.name]
    last = lines[-1]
    assert last.startswith("not enough: ") and "CONFIG_GRAD_CHECKPOINT_BLOCKS=y needs " in last


def without_room(
    config: Config, data: TrainingData, machine: Hardware, *, kinds: tuple[str, ...]
) -> tuple[Hardware, NoRoomError]:
    """Return `machine` with memory for `kinds` of the run's alone, and the error there."""
    held = 1
    for _ in range(2):
        (device,) = machine.devices
        device = dataclasses.replace(device, free_bytes=held)
        small = dataclasses.replace(machine, devices=(device,))
        with pytest.raises(NoRoomError) as caught:
            look_ahead(config, data, small, MemoryTraces(config, data))
        held = sum(caught.value.memory.parts[kind] for kind in kinds)
    return small, caught.value


def test_what_would_fit_combines_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters and shorter sequences, each length only where the longer one is too much."""
    config = small_config("gpt2", optimizer="adamw", grad_checkpoint="none", block_size=4096)
    config = config.replace(initial_weights="base.safetensors")
    tried, settings = list[str](), {"channels_last": False, "compile": False, "norm_batch": 0}
    step = StepSettings(device="cuda", several_devices=False, precision="bf16", **settings)  # type: ignore[arg-type]

    def memory_of(changed: Config, machine: Hardware) -> Memory:
        """Memory of which the activations alone grow with the sequence; 30 GB are there."""
        weights = {"full": 100, "lora": 25, "qlora": 10}[changed.weights.adapt]
        assert changed.block_size
        active = changed.block_size // (100 if changed.grad_checkpoint == "blocks" else 25)
        parts = {"parameters": weights, "activations": active}
        parts = {name: 10**9 * (size // len(machine.devices)) for name, size in parts.items()}
        return Memory(parts=parts, reserve_bytes=0, usable_bytes=30 * 10**9)

    def planned(changed: Config, _: object, machine: Hardware, *__: object, **___: object) -> Any:
        weights, own = changed.weights.adapt, changed.grad_checkpoint
        tried.append(f"{weights} {own} {changed.block_size} x{len(machine.devices)}")
        if not (memory := memory_of(changed, machine)).fits:
            raise NoRoomError("none", why="none", todo="none", step=step, memory=memory)
        return SimpleNamespace(
            plan=SimpleNamespace(memory=memory, micro_batch=1, accumulation=4), step_time=None
        )

    monkeypatch.setattr("train.planning.command.look_ahead", planned)
    monkeypatch.setattr("train.planning.command.most_recomputed", lambda *_: "blocks")
    monkeypatch.setattr("train.planning.command.data_for", lambda *_, **__: None)
    machine, data = parse_gpu("rtx3090"), text_data(config)
    error = NoRoomError("none", why="none", todo="none", step=step, memory=memory_of(config, machine))
    *found, last = what_would_fit(config, data, machine, error, root=ROOT)
    assert [line.partition(" (")[0] for line in found] == [
        "CONFIG_ADAPT_LORA=y CONFIG_GRAD_CHECKPOINT_BLOCKS=y CONFIG_BLOCK_SIZE=512",
        "CONFIG_ADAPT_QLORA=y CONFIG_GRAD_CHECKPOINT_BLOCKS=y CONFIG_BLOCK_SIZE=2048",
        "CONFIG_GRAD_CHECKPOINT_BLOCKS=y, 8 devices: 1 x 4, 17.00 GB of 30.00 GB usable",
    ]
    assert tried == [
        "lora none 4096 x1", "lora blocks 4096 x1", "qlora blocks 4096 x1",
        "lora blocks 2048 x1", "lora blocks 1024 x1", "lora blocks 512 x1", "qlora blocks 2048 x1",
        *(f"full none 4096 x{count}" for count in (2, 4, 8)),
        *(f"full blocks 4096 x{count}" for count in (2, 4, 8)),
    ]  # fmt: skip
    assert "CONFIG_GRAD_CHECKPOINT_BLOCKS=y needs more than 100.00 GB" in last


@pytest.mark.slow
def test_what_would_fit_recomputes_as_much_as_the_model_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a chain, as those of transformers, recomputes blocks and not all."""

    def configure(model: nn.Module, recompute: Recompute) -> bool:
        if recompute == "all":
            raise ConfigError("all is not possible", todo="choose blocks")
        return configure_recomputation(model, recompute)

    monkeypatch.setattr("train.training_data.configure_recomputation", configure)
    config = small_config("gpt2", target_effective_batch=4, optimizer="adamw", auto_method="predict")
    config = config.replace(initial_weights="base.safetensors")
    data, machine = text_data(config), parse_gpu("rtx3090")
    small, error = without_room(config, data, machine, kinds=("parameters", "optimizer"))
    *refused, last = what_would_fit(config, data, small, error, root=ROOT)
    assert [line for line in refused if "all is not" in line] == [
        "not tried: all is not possible; choose blocks"
    ]
    for adapt in ("LORA", "QLORA"):
        assert f"CONFIG_ADAPT_{adapt}=y CONFIG_GRAD_CHECKPOINT_BLOCKS=y (not the same" in last
    assert "CONFIG_GRAD_CHECKPOINT_ALL" not in last


@pytest.mark.slow
def test_a_change_that_the_model_refuses_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, recompute: str) -> bool:
        if recompute != "none":
            raise ConfigError(f"{recompute} is not possible", todo="choose another")
        return False

    monkeypatch.setattr("train.training_data.configure_recomputation", refuse)
    lines = short_of_memory("h100-80g", BATCH, optimizer="adamw").alternatives
    why = "is not possible; choose another"
    assert lines[:2] == (f"not tried: blocks {why}", f"not tried: all {why}")
    assert any(line.startswith("CONFIG_OPTIMIZER_SGD=y") for line in lines[2:])


@pytest.mark.slow
def test_the_setting_of_the_allocator_is_shown_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    found = outlook("h100-80g", BATCH)
    ours = "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert found.to_json()["allocator"] == ours
    (line,) = [line for line in _lines(found) if line.startswith("Allocator: ")]
    assert line == f"Allocator: {ours} (the default of runs; what you set in the environment is kept)"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    lines = list(_lines(found))
    assert "Allocator: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 (set in the environment)" in lines
    other = outlook("mi300x", BATCH)
    assert other.to_json()["allocator"] is None
    assert not [line for line in _lines(other) if line.startswith("Allocator")]


def test_what_is_no_fault_of_a_machine_is_told_once() -> None:
    config = small_config(target_effective_batch=10**6, norm_batch=0)
    data = random_data(config, shape=(1, 28, 28), train_size=640)
    with pytest.raises(PlanError, match="on none of 2 machines: "):
        _compare(config, data, ("t4", "rtx3090"), as_json=True)


@pytest.mark.slow
def test_a_batch_by_hand_that_is_too_large_is_marked_among_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(hyper_param="manual", batch_size=64, gradient_accumulation=1)
    data = random_data(config, shape=(1, 28, 28), train_size=640)
    real = MemoryTraces.predictor
    twenty = {"activations": 20 * 10**9}
    monkeypatch.setattr(
        MemoryTraces,
        "predictor",
        lambda self, hardware: lambda trial: {**real(self, hardware)(trial), **twenty},
    )
    assert _compare(config, data, ("t4", "rtx3090"), as_json=False) == 0
    head, large, small, _, legend, told = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "GPU" and large.endswith("  yes") and told.startswith("Sorted by time, ")
    assert legend.startswith("batch: samples at a time x micro-batches")
    assert small.startswith("t4") and small.endswith("no: MORE than there is")


@pytest.mark.slow
def test_what_machines_do_otherwise_than_was_set_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(
        compilation=CompileOptions(compile="auto", compile_model=None, compile_blocks=False, cuda_graphs=True)
    )
    data = random_data(config, shape=(1, 28, 28), train_size=640)
    assert _compare(config, data, ("t4", "rtx3090", "mi300x", "w7900"), as_json=False) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cuda graphs: ")]
    assert len(notes) == 2
    assert any(line.endswith("are for NVIDIA GPUs only (mi300x, w7900)") for line in notes)


@pytest.mark.slow
def test_machines_are_sorted_by_money_where_there_is_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(max_steps=100)
    data = random_data(config, shape=(1, 28, 28), train_size=640)
    assert (
        _compare(config, data, ("p100-16g", "rtx2060-6g", "h100-80g", "t4"), as_json=True, price="list") == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert list(found)[:2] == ["t4", "h100-80g"], "cheap first; without a list price last"
    costs = {name: each["cost"] for name, each in found.items()}
    assert {name for name, cost in costs.items() if cost["price"] is None} == {"p100-16g", "rtx2060-6g"}
    assert "https://" in costs["t4"]["price"][1] and costs["p100-16g"]["money"] is None
    assert costs["h100-80g"]["steps"] == [100, 100] and costs["h100-80g"]["kwh"][0] > 0
    launches = found["t4"]["kernel_launches"]
    assert launches["forward"] > 5 and launches["update"] > 0
    assert found["t4"]["step_bound"] == "launching kernels"
    assert _compare(config, data, ("t4", "h100-80g"), as_json=False, price="list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Money: list price of ") and line.endswith(": t4") for line in lines)
    assert " US dollars  yes" in lines[1]
    assert _compare(config, data, ("t4", "h100-80g"), as_json=False, price="2") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Money: PRICE=2 an hour for each device"


@pytest.mark.slow
def test_machines_whose_time_or_money_is_not_known_come_last() -> None:
    known = outlook("h100-80g", BATCH)
    timeless = dataclasses.replace(known, cost=dataclasses.replace(known.cost, seconds=None, steps=None))
    assert _rank(known, "") < _rank(timeless, "") < _rank(PlanError("does not fit"), "")
    priced = dataclasses.replace(known, cost=dataclasses.replace(known.cost, money=(9.0, 9.0)))
    assert _rank(priced, "list") < _rank(known, "list") < _rank(timeless, "list")


@pytest.mark.slow
def test_the_choice_of_a_strategy_and_the_headline_have_the_same_time() -> None:
    """Both count kernel launches, by which small models are bound."""
    found = outlook("h100-80gx2", 8)
    assert found.step_time is not None and found.step_time.bound == "launching kernels"
    first = found.strategies[0]
    assert first.layout.strategy == "ddp" and first.seconds == pytest.approx(
        (found.step_time.fastest_seconds, found.step_time.slowest_seconds)
    )


@pytest.mark.slow
def test_launches_of_each_micro_batch_count() -> None:
    whole, split = outlook("h100-80g", BATCH).launches, outlook("h100-80g", 8).launches
    assert whole.update == split.update and whole.forward == split.forward > 5
    assert split.of_step(8) == 8 * (split.forward + split.backward) + split.update


@pytest.mark.parametrize(
    ("shipped", "option", "gpu", "message"),
    [
        ("lenet5", "DIST_ENDPOINT=here:1", "", "DIST_ENDPOINT=here:1 is for several nodes"),
        ("lenet5", "DIST_ENDPOINT=here:1", "h100-80g", "DIST_ENDPOINT=here:1 is for several nodes"),
        (
            "lenet5",
            "DIST_NNODES=2",
            "",
            "CONFIG_DIST_ENDPOINT is not set: 2 nodes need one, .* set CONFIG_DIST_ENDPOINT=HOST:PORT",
        ),
        ("gpt2-tiny", "INITIAL_WEIGHTS=nothing", "", "INITIAL_WEIGHTS=.*nothing cannot be read"),
    ],
)
def test_what_training_refuses_is_not_planned(shipped: str, option: str, gpu: str, message: str) -> None:
    name, _, value = option.partition("=")
    requested = kconf.load(
        root=ROOT, config_file=ROOT / "defconfigs" / shipped, overrides={f"CONFIG_{name}": value}
    )
    with pytest.raises(ConfigError, match=message):
        plan(requested, root=ROOT, gpu=gpu, as_json=True)


@pytest.mark.parametrize(
    ("line", "todo"), [("CONFIG_EMA=n: 1 x 4", "changes above"), ("not enough: ", "SGD")]
)
def test_the_last_line_of_what_does_not_fit_agrees_with_the_table(
    line: str, todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        step = StepSettings(
            device="cuda",
            several_devices=False,
            norm_batch=0,
            precision="bf16",
            channels_last=False,
            compile=False,
        )
        memory = Memory(parts={}, reserve_bytes=0, usable_bytes=0)
        raise NoRoomError("it does not fit", why="it is large", todo="use SGD", step=step, memory=memory)

    monkeypatch.setattr("train.planning.command.look_ahead", refuse)
    monkeypatch.setattr("train.planning.command.what_would_fit", lambda *_, **__: iter([line]))
    requested = kconf.load(root=ROOT, config_file=ROOT / "defconfigs/lenet5", overrides={})
    with pytest.raises(PlanError, match=todo):
        plan(requested, root=ROOT, gpu="rtx3090", as_json=False)


def test_half_precision_may_shrink_frozen_weights() -> None:
    """So that it is traced, not called hopeless, where the weights alone are too much."""
    machine, base = parse_gpu("rtx3090"), small_config("gpt2").replace(precision="fp32")
    for adapt, keeps in (("full", ("parameters", "optimizer")), ("lora", ())):
        found = further_changes(base.replace(adapt=adapt), machine, precision="fp32", recompute="none")
        assert [each.keeps for each in found if each.name == "CONFIG_PRECISION_BF16=y"] == [keeps]
