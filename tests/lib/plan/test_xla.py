"""What is decided for XLA devices, and what is refused there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from lib.distributed.rendezvous import Rendezvous
from lib.errors import ConfigError, PlanError
from lib.hyperparams import apply_hyperparams
from lib.plan import plan
from lib.plan.fitting import Parts, StepSettings
from lib.plan.placement import refuse_static_shapes
from lib.plan.types import Hardware, Plan
from scripts import cluster
from scripts.bench import throughput
from tests.support.configs import load_hardware, make_config, make_facts
from tests.support.stubbed import no_probe, printed_elsewhere
from tests.support.training import random_data
from train import commands, multi_node
from train.planning import autotune
from train.planning.run_plan import RunRequest
from train.preflight import command as preflight

CHIPS = {"tpu-v4-8": 4, "tpu-v5e-8": 8}
V4 = load_hardware("tpu-v4-8")


def decide(machine: Hardware = V4, model: str = "resnet18", **changes: Any) -> Plan:
    return plan(make_config(model, device="xla", **changes), machine, make_facts(model))


@pytest.mark.parametrize("name", CHIPS)
def test_what_is_decided_for_a_host_of_tpus(name: str) -> None:
    decided = decide(load_hardware(name))
    assert (decided.device, decided.world, decided.strategy) == ("xla", CHIPS[name], "ddp")
    assert decided.effective_batch == decided.target == make_config("resnet18").target
    assert (decided.precision, decided.compile, decided.channels_last) == ("bf16", False, False)
    assert "EXPERIMENTAL, never run on TPU hardware" in decided.reasons["device"]
    assert "compiles whole steps" in decided.reasons["compile"]
    assert "CONFIG_CHANNELS_LAST" in decided.reasons["channels_last"]


def test_what_is_left_out_is_said() -> None:
    found = decide(model="lenet5", activation_offload=True)
    assert "XLA places tensors itself" in found.reasons["memory"]
    assert decide(model="lenet5", channels_last=False).reasons["channels_last"] == "CONFIG_CHANNELS_LAST=n"
    manual = decide(compile="manual", compile_model=False)
    assert not manual.compile


def test_a_processor_behind_xla_is_no_tpu() -> None:
    device = dataclasses.replace(V4.devices[0], name="CPU")
    decided = decide(dataclasses.replace(V4, devices=(device,)))
    assert decided.precision == "fp32" and "not a TPU" in decided.reasons["precision"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"precision": "fp16"}, "PRECISION_FP16 is not possible.*loss scaling is for CUDA"),
        (
            {"compile": "manual", "compile_model": True},
            "COMPILE_MODEL=y is not possible.*compiles whole steps",
        ),
        (
            {"num_devices": 2},
            r"NUM_DEVICES=2 is not possible.*all 4 have a process each; set it to 0, 1 or 4",
        ),
        ({"norm_batch": 0}, "NORM_BATCH=0 is not possible.*running statistics of its own"),
        ({"dist_strategy": "fsdp"}, "DIST_STRATEGY_FSDP=y is not possible.*XLA devices hold replicas"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=f"^CONFIG_{why}"):
        decide(**changes)


def test_one_device_may_have_plain_batch_normalisation() -> None:
    decided = decide(norm_batch=0, num_devices=1)
    assert (decided.world, decided.norm_batch) == (1, 0)


def test_it_is_asked_for_by_name() -> None:
    with pytest.raises(PlanError, match="CONFIG_DEVICE_XLA is not possible"):
        decide(load_hardware("rtx3090"))


def test_others_may_compute_on_the_processor_first() -> None:
    refuse_static_shapes("cuda", what="make bench")


def test_memory_is_predicted_for_what_is_decided() -> None:
    def predict(trial: StepSettings) -> Parts:
        assert (trial.device, trial.channels_last, trial.compile) == ("xla", False, False)
        return {"activations": trial.micro_batch}

    requested = make_config("resnet18", device="xla", auto_method="predict")
    memory = plan(requested, V4, make_facts("resnet18"), predict=predict).memory
    assert memory is not None and memory.usable_bytes == round(0.8 * V4.devices[0].free_bytes)


@pytest.mark.parametrize(
    ("machine", "sizes"), [("tpu-v4-8", (7,) * 4), ("h100-80g-70g-free-x4", (10, 10, 8))]
)
def test_micro_batches_are_of_one_size(machine: str, sizes: tuple[int, ...]) -> None:
    """Another one would be another graph."""

    def ten_fit(trial: StepSettings) -> Parts:
        return {"activations": 0 if trial.micro_batch <= 10 else 10**12}

    requested = make_config("lenet5", auto_method="predict", compile="manual", compile_model=False)
    requested = requested.replace(target_effective_batch=4 * 28)
    assert plan(requested, load_hardware(machine), make_facts(), predict=ten_fit).micro_batches == sizes


def test_what_would_compute_first_asks_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput.kconf, "from_environment", lambda _: Settings())
    for module in (throughput, preflight):
        monkeypatch.setattr(module, "with_tier", lambda *_, **__: Settings())
        monkeypatch.setattr(module, "config_from_values", lambda _: make_config(device="xla"))
        opens = "open_training_data" if module is throughput else "open_to_train"
        monkeypatch.setattr(module, opens, lambda *_, **__: SUBJECT)
        monkeypatch.setattr(module, "probe", lambda _: V4)
    with pytest.raises(PlanError, match=r"^make bench is not for XLA devices"):
        throughput.plain_case(Path(), *throughput.configured())
    with pytest.raises(PlanError, match=r"^make preflight is not for XLA devices"):
        preflight.preflight(Settings(), root=Path(), runs=Path(), as_json=True)
    with pytest.raises(PlanError, match=r"^measuring .* is not for XLA devices"):
        autotune.measure(SimpleNamespace(hardware=V4))  # type: ignore[arg-type]


# How it is launched


SUBJECT = random_data(make_config(), shape=(1, 28, 28), train_size=4)


def test_the_command_of_a_host_is_printed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(device="xla", num_devices=4)
    label, command = printed_elsewhere(config, monkeypatch)
    assert label.startswith("# Experimental, never run on TPU hardware")
    assert command == "PJRT_DEVICE=TPU python -m train --runs runs train # starts 4 processes"
    slice_of_two = config.replace(dist_nnodes="2", dist_endpoint="here:29500")
    _, command = printed_elsewhere(slice_of_two, monkeypatch)
    own = "PJRT_DEVICE=TPU python -m train --runs runs train # starts torchrun --nnodes=2 --nproc-per-node=4 "
    assert command.startswith(own)


def test_on_a_host_of_tpus_it_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "probe", lambda _: load_hardware("tpu-v5e-8"))
    command = cluster.command_line(make_config(device="xla"), name="x", runs=Path("runs"))
    assert "PJRT_DEVICE=TPU python -m train --runs runs train # starts 8 processes" in command
    processor = dataclasses.replace(V4, devices=(dataclasses.replace(V4.devices[0], name="CPU"),))
    monkeypatch.setattr(cluster, "probe", lambda _: processor)
    command = cluster.command_line(make_config(device="xla"), name="x", runs=Path("runs"))
    assert command == "python -m train --runs runs train"


class Launched(Exception):
    """In place of the supervisor."""


class Settings:
    """In place of what was resolved."""

    values = in_effect = MappingProxyType({"MODEL": "lenet5"})

    def to_json(self) -> dict[str, Any]:
        return {}


def test_processes_of_several_hosts_are_told_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def launch(payload: dict[str, Any], **_: Any) -> None:
        told.update(payload)
        raise Launched

    monkeypatch.setattr(multi_node, "launch", launch)
    monkeypatch.setattr(multi_node, "probe", lambda _: V4)
    config = make_config(device="xla", dist_nnodes="2", dist_endpoint="here:1", target_effective_batch=512)
    two, elastic = (Rendezvous(min_nodes=least, max_nodes=2, endpoint="here:1") for least in (2, 1))
    with pytest.raises(Launched):
        multi_node.launch_multi_node(config, Settings(), two)  # type: ignore[arg-type]
    assert Hardware.from_json(told["hardware"]) == V4
    with pytest.raises(ConfigError, match=r"is not for XLA devices: the number .*CONFIG_DIST_NNODES=2$"):
        multi_node.launch_multi_node(config, Settings(), elastic)  # type: ignore[arg-type]
    monkeypatch.setattr(multi_node, "probe", lambda _: load_hardware("rtx3090"))
    with pytest.raises(Launched):
        multi_node.launch_multi_node(config.replace(device="auto"), Settings(), two)  # type: ignore[arg-type]
    assert told["hardware"] is None, "others are asked anew"


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (
            {"hyper_param": "manual", "batch_size": 8, "gradient_accumulation": 2},
            "CONFIG_GRADIENT_ACCUMULATION=2",
        ),
        ({"elastic_scale_batch": True}, "CONFIG_ELASTIC_SCALE_BATCH=y"),
        ({"batch_table_strict": True}, "CONFIG_BATCH_TABLE_STRICT=y"),
    ],
)
def test_machines_that_come_and_go_do_not_change_the_batch(
    changes: dict[str, Any], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi_node, "launch", lambda *_, **__: (_ for _ in ()).throw(Launched))
    config = make_config(device="cpu", dist_nnodes="1:2", dist_endpoint="here:1", target_effective_batch=512)
    one, elastic = (Rendezvous(min_nodes=least, max_nodes=2, endpoint="here:1") for least in (2, 1))
    with pytest.raises(Launched):
        multi_node.launch_multi_node(config, Settings(), elastic)  # type: ignore[arg-type]
    config = config.replace(**changes)
    with pytest.raises(Launched):
        multi_node.launch_multi_node(config, Settings(), one)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^{option} is not for CONFIG_DIST_NNODES=1:2: "):
        multi_node.launch_multi_node(config, Settings(), elastic)  # type: ignore[arg-type]


class Alone:
    """A process that met no other."""

    world = local_world = 1
    device = torch.device("cpu")

    def broadcast(self, value: Any) -> Any:
        return value

    def all_reduce_max(self, values: Any) -> list[float]:
        return list(values)

    def all_reduce_sum(self, _: Any) -> None:
        pass


def test_who_was_told_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(multi_node, "probe", no_probe)
    monkeypatch.setattr(multi_node, "open_backend", lambda kind, **_: opened.append(kind) or Alone())
    one = dataclasses.replace(V4, devices=V4.devices[:1])
    _, found = multi_node.join_rendezvous(make_config(device="xla"), known=one.to_json())
    assert found == dataclasses.replace(one, of_all_nodes=True, per_node=1) and opened == ["xla"]


@pytest.mark.slow
def test_even_one_device_is_for_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory was predicted in this one, which made a backward pass."""
    config = make_config(device="xla", num_devices=1)
    worlds: list[int] = []

    def launch(_: Any, *, world: int, **__: Any) -> None:
        worlds.append(world)
        raise Launched

    monkeypatch.setattr(commands, "launch", launch)
    monkeypatch.setattr(commands, "open_training_data", lambda *_, **__: None)
    monkeypatch.setattr("train.planning.run_plan.probe", lambda _: V4)
    monkeypatch.setattr(commands, "probe", lambda _: V4)
    monkeypatch.setattr(commands, "plan_for", lambda *_: plan(config, V4, make_facts()))
    request = RunRequest(resolved=Settings(), config=config, root=Path(), runs=Path(), started=0.0)  # type: ignore[arg-type]
    with pytest.raises(Launched):
        commands._plan_and_train(request)
    assert worlds == [1]
    lost = dataclasses.replace(request, config=config.replace(dist_endpoint="here:1"))
    with pytest.raises(ConfigError, match="CONFIG_DIST_ENDPOINT=here:1 is for several nodes"):
        commands._plan_and_train(lost)


def test_it_is_called_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    apply_hyperparams(make_config(device="xla"), hardware=V4, facts=make_facts())
    assert "XLA: TPU (34.1GB total" in capsys.readouterr().out
