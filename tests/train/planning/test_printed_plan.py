"""The order of what `make plan` prints, and plans of several nodes."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from lib import kconf
from lib.plan.gpus import parse_gpu
from tests.support.configs import ROOT
from tests.support.training import small_config
from train.planning.command import _machine, _on_all_nodes, plan


@pytest.mark.slow
def test_named_nodes_are_planned_without_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = {"CONFIG_DIST_NNODES": "2", "CONFIG_DIST_NETWORK_GBIT": "25"}
    requested = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides=overrides)
    assert plan(requested, root=ROOT, gpu="h100-80gx2", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["world"] == 4
    links = {"node_bytes_per_second": 450e9, "network_bytes_per_second": 25e9 / 8, "per_node": 2}
    assert found["links_assumed"] == links


@pytest.mark.slow
def test_a_plan_begins_with_what_is_requested_and_ends_with_its_cost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    requested = kconf.load(root=ROOT, config_file=ROOT / "defconfigs" / "lenet5", overrides={})
    assert plan(requested, root=ROOT, gpu="h100-80g", as_json=False, price="2") == 0
    lines = capsys.readouterr().out.splitlines()
    asked = [line for line in lines if line.startswith("requested: ")]
    first = lines.index(asked[0])
    assert lines[first : first + len(asked) + 1] == [*asked, ""]
    assert lines[first + len(asked) + 1].startswith("device ")
    heads = [line.split()[0] for line in lines[-4:]]
    assert heads == ["Training:", "That", "Energy:", "Money:"], lines[-4:]
    assert " steps, 10 epochs (estimate" in lines[-4]


def test_several_nodes_are_planned_as_they_train() -> None:
    """As after the rendezvous of the least number of nodes."""
    config = small_config(dist_nnodes="2:3", num_devices=0)
    config = config.replace(launch=dataclasses.replace(config.launch, dist_endpoint="here:29500"))
    asked, joined = _on_all_nodes(config, parse_gpu("h100-80gx4"))
    assert len(joined.devices) == asked.num_devices == 8 and joined.per_node == 4 and joined.of_all_nodes
    assert _on_all_nodes(small_config(), joined) == (small_config(), joined), "one node stays as it is"


def test_a_name_with_a_number_of_devices_does_not_get_another() -> None:
    def found(devices: int) -> Any:
        return SimpleNamespace(cost=SimpleNamespace(devices=devices))

    assert _machine("t4x4", found(4)) == "t4x4" and _machine("t4", found(1)) == "t4"
    assert _machine("tpu-v4-8", found(4)) == "tpu-v4-8 (4 devices)"
