"""The driver of a Ray job, with a stand-in for Ray that runs tasks at once and in turn."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class StandIn:
    """Ray, as far as it is used; a task's result stands for its reference."""

    groups: list[tuple[Any, ...]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)

    def remote(self, function: Callable[..., Any]) -> Any:
        def options(**requested: Any) -> Any:
            self.tasks.append(requested)
            return types.SimpleNamespace(remote=function)

        return types.SimpleNamespace(options=options)

    def get(self, reference: Any) -> Any:
        return reference

    def wait(self, references: list[Any]) -> tuple[list[Any], list[Any]]:
        return references[-1:], references[:-1]  # the last one is done first

    def placement_group(self, bundles: list[dict[str, int]], *, strategy: str) -> Any:
        self.groups.append((bundles, strategy))
        return types.SimpleNamespace(ready=lambda: None)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[StandIn, Any]]:
    stand_in = StandIn()
    modules = {
        "ray": {"remote": stand_in.remote, "get": stand_in.get, "wait": stand_in.wait},
        "ray.util": {"get_node_ip_address": lambda: "192.0.2.7"},
        "ray.util.placement_group": {"placement_group": stand_in.placement_group},
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda _, place: place},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], own, module, raising=False)
    monkeypatch.delitem(sys.modules, "scripts.ray_machines", raising=False)
    yield stand_in, importlib.import_module("scripts.ray_machines")
    sys.modules.pop("scripts.ray_machines")


def test_each_machine_is_another_and_is_told_the_first(
    ray: tuple[StandIn, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in, driver = ray
    log = f'echo "$MACHINE_NUMBER $FIRST_MACHINE $THIS_MACHINE $PWD" >> {tmp_path}/said'
    monkeypatch.setenv("ANNEAL_START", log)
    assert driver.run_on_each(machines=2, gpus=4) == 0
    assert stand_in.groups == [([{"CPU": 1, "GPU": 4}] * 2, "STRICT_SPREAD")]
    assert [task["scheduling_strategy"] for task in stand_in.tasks] == [0, 0, 1]  # the first: for its address
    assert all((task["num_gpus"], task["max_retries"]) == (4, 0) for task in stand_in.tasks)
    said = (tmp_path / "said").read_text().splitlines()
    assert said == [f"{number} 192.0.2.7 192.0.2.7 {driver.ROOT}" for number in (0, 1)]


def test_one_that_fails_fails_all(ray: tuple[StandIn, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, driver = ray
    monkeypatch.setenv("ANNEAL_START", "exit $((MACHINE_NUMBER * 3))")
    assert driver.run_on_each(machines=2, gpus=0) == 3
