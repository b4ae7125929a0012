"""What is decided for TPUs by torch_tpu, and what is refused there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lib.devices import accelerators
from lib.distributed.rendezvous import Rendezvous
from lib.errors import PlanError
from lib.hyperparams import apply_hyperparams
from lib.plan import plan
from lib.plan.placement import ACCEPTED_KINDS, refuse_static_shapes
from lib.plan.types import Device, Hardware, Plan
from scripts import cluster
from tests.support.configs import load_hardware, make_config, make_facts
from tests.support.stubbed import no_probe, printed_elsewhere
from tests.support.training import random_data, small_config
from train import commands, multi_node
from train.build import placement_of
from train.planning.run_plan import RunRequest

CHIP = Device(name="TPU v5e", total_bytes=16 * 10**9, free_bytes=15 * 10**9)
HOST = dataclasses.replace(load_hardware("tpu-v5e-8"), kind="tpu", devices=(CHIP,) * 4)


def decide(machine: Hardware = HOST, model: str = "resnet18", **changes: Any) -> Plan:
    return plan(make_config(model, **{"device": "tpu", **changes}), machine, make_facts(model))


def test_what_is_decided_for_a_host() -> None:
    decided = decide()
    assert (decided.device, decided.world, decided.strategy) == ("tpu", 4, "ddp")
    assert decided.effective_batch == decided.target == make_config("resnet18").target
    assert (decided.precision, decided.compile, decided.channels_last) == ("bf16", False, False)
    assert "EXPERIMENTAL, never run on TPU hardware" in decided.reasons["device"]
    assert "never tried" in decided.reasons["compile"]
    assert decide(norm_batch=0).norm_batch == 0, "buffers are shared as on GPUs"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"precision": "fp16"}, "PRECISION_FP16 is not possible.*loss scaling is for CUDA"),
        (
            {"compile": "manual", "compile_model": True},
            "COMPILE_MODEL=y is not possible.*compiler was never tried",
        ),
        ({"num_devices": 2}, r"NUM_DEVICES=2 is not possible on TPUs: .*all 4 have a process each"),
        ({"dist_strategy": "fsdp"}, "DIST_STRATEGY_FSDP=y is not possible.*TPUs hold replicas"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=f"^CONFIG_{why}"):
        decide(**changes)


def test_it_is_asked_for_by_name() -> None:
    with pytest.raises(PlanError, match="CONFIG_DEVICE_TPU is not possible"):
        decide(load_hardware("tpu-v5e-8"))  # of torch_xla
    assert ACCEPTED_KINDS["xla"] == ("xla",)
    with pytest.raises(PlanError, match=r"^make bench is not for TPUs: torch takes no more devices"):
        refuse_static_shapes("tpu", what="make bench")


def test_data_are_streamed() -> None:
    data = random_data(small_config(), shape=(1, 28, 28), train_size=4)
    assert placement_of(make_config(), data, HOST, world=4)[0] == "stream"


def test_it_is_called_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    apply_hyperparams(make_config(device="tpu"), hardware=HOST, facts=make_facts())
    assert "TPU: TPU v5e (16.0GB total" in capsys.readouterr().out


# How it is launched


def test_the_command_of_a_host_is_printed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    label, command = printed_elsewhere(make_config(device="tpu", num_devices=4), monkeypatch)
    assert label == "# Experimental, never run on TPU hardware."
    told = "env $(python -m lib.devices.tpu launch 4) python -m train --runs runs train # starts 4 processes"
    assert command == told
    monkeypatch.setattr(cluster, "probe", lambda _: HOST)
    alone = cluster.command_line(make_config(device="tpu"), name="x", runs=Path("runs"))
    assert told in alone


def test_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(device="tpu", num_devices=4, dist_nnodes="2", dist_endpoint="here:29500")
    monkeypatch.setattr(multi_node, "probe", no_probe)
    with pytest.raises(PlanError, match=r"^CONFIG_DEVICE_TPU is for one node: .*CONFIG_DIST_NNODES=1$"):
        cluster.command_line(config, name="x", runs=Path("runs"))
    rendezvous = Rendezvous(min_nodes=2, max_nodes=2, endpoint="here:29500")
    with pytest.raises(PlanError, match=r"^CONFIG_DEVICE_TPU is for one node"):
        multi_node.launch_multi_node(config, None, rendezvous)  # type: ignore[arg-type]


class Launched(Exception):
    """In place of the supervisor."""


@pytest.mark.parametrize("wanted", [1, 4])
def test_processes_are_told_their_devices_before_they_start(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(device="tpu", num_devices=wanted)
    told: list[Any] = []

    def launch(_: Any, *, world: int, variables: dict[str, str], **__: Any) -> None:
        told.extend((world, variables))
        raise Launched

    monkeypatch.setattr(commands, "launch", launch)
    monkeypatch.setattr(accelerators, "launch_variables", lambda kind, *, processes: {kind: str(processes)})
    monkeypatch.setattr(commands, "open_to_train", lambda *_, **__: None)
    monkeypatch.setattr(commands, "probe", lambda _: HOST)
    monkeypatch.setattr(commands, "plan_for", lambda *_: plan(config, HOST, make_facts()))
    with pytest.raises(Launched):
        commands._plan_and_train(order_of(config))
    assert told == [wanted, {"tpu": str(wanted)}]


def order_of(config: Any) -> RunRequest:
    class Settings:
        def to_json(self) -> dict[str, Any]:
            return {}

    return RunRequest(resolved=Settings(), config=config, root=Path(), runs=Path(), started=0.0)  # type: ignore[arg-type]
