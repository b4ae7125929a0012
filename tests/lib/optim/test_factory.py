"""Optimizers: what decays, what is passed on, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lib.optim.factory import make_optimizer

ASKED: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.8, "nesterov": True, "adam_beta1": None, "adam_beta2": None, "adam_eps": None},
    "adam": {"momentum": None, "nesterov": False, "adam_beta1": 0.7, "adam_beta2": 0.95, "adam_eps": 1e-5},
}
ASKED["adamw"] = ASKED["adam"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def optimizer(model: nn.Module, name: Any, **changes: Any) -> torch.optim.Optimizer:
    return make_optimizer(model, name=name, learning_rate=0.03, weight_decay=0.2, **ASKED[name] | changes)


@pytest.mark.parametrize("name", ASKED)
def test_every_trainable_parameter_is_in_the_group_of_its_dimensions(name: str) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    decaying, others = optimizer(model, name).param_groups
    assert [id(p) for p in decaying["params"]] == [id(model[0].weight), id(model[3].weight)]
    assert [id(p) for p in others["params"]] == [id(model[1].weight), id(model[1].bias), id(model[3].bias)]
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    assert decaying["lr"] == others["lr"] == 0.03


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_without_gradient_only_matrices_and_filters_shrink(name: str) -> None:
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    rule = optimizer(model, name, **({"momentum": 0.0, "nesterov": False} if name == "sgd" else {}))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rule.step()
    for parameter in model.parameters():
        expected = 1 - 0.03 * 0.2 if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, expected))


def test_the_rule_is_the_one_that_was_asked_for() -> None:
    assert type(optimizer(network(), "sgd")) is torch.optim.SGD
    assert type(optimizer(network(), "adam")) is torch.optim.Adam
    assert type(optimizer(network(), "adamw")) is torch.optim.AdamW


def test_constants_are_passed_on() -> None:
    sgd, adam = optimizer(network(), "sgd").defaults, optimizer(network(), "adam").defaults
    assert (sgd["momentum"], sgd["nesterov"]) == (0.8, True)
    assert (adam["betas"], adam["eps"]) == ((0.7, 0.95), 1e-5)


@pytest.mark.parametrize("name", ASKED)
def test_a_state_without_peaks_keeps_those_that_were_asked_for(name: str) -> None:
    state = optimizer(network(), name).state_dict()
    for group in state["param_groups"]:
        del group["peak_lr"]
        group["lr"] = 0.001  # where a schedule had got to
    rule = optimizer(network(), name)
    rule.load_state_dict(state)
    assert [(group["lr"], group["peak_lr"]) for group in rule.param_groups] == [(0.001, 0.03)] * 2


@pytest.mark.parametrize("name", ASKED)
def test_the_peaks_of_a_state_count(name: str) -> None:
    rule, other = optimizer(network(), name), optimizer(network(), name)
    other.param_groups[1]["peak_lr"] = 0.5
    rule.load_state_dict(other.state_dict())
    assert [group["peak_lr"] for group in rule.param_groups] == [0.03, 0.5]


def test_fused_kernels_are_used_where_there_are_any() -> None:
    assert optimizer(network(), "adamw").defaults["fused"] is True
    assert optimizer(network().to("meta"), "adamw").defaults["fused"] is False


@pytest.mark.parametrize("name", ASKED)
def test_fused_steps_in_fp64_follow_the_plain_formula(name: str) -> None:
    def weights_after_3_steps(*, fused: bool) -> list[torch.Tensor]:
        model = network().double()
        rule = optimizer(model, name)
        for group in rule.param_groups:
            group["fused"] = fused
        for step in range(3):
            model(torch.linspace(-1, step, 2 * 2 * 16).view(2, 2, 4, 4).double()).square().sum().backward()
            rule.step()
            rule.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    for a, b in zip(weights_after_3_steps(fused=True), weights_after_3_steps(fused=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


class Deep(nn.Module):
    """A stem, two blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.inner = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)

    def hidden_matrices(self) -> list[nn.Parameter]:
        return [self.inner[0].one.weight, self.inner[1].one.weight]  # type: ignore[union-attr, list-item]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)


def rates(model: nn.Module, rule: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(each)]: group["lr"] for group in rule.param_groups for each in group["params"]}
    assert found.keys() == set(names.values())
    return {name: round(rate, 6) for name, rate in found.items()}


MUON = ASKED["adam"] | {"momentum": 0.9, "muon_learning_rate": 0.01}


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_each_block_has_a_part_of_the_rate_of_the_next(name: str) -> None:
    model, own = Deep(), MUON if name == "muon" else ASKED[name]
    common = {"learning_rate": 0.1, "weight_decay": 0.2, "layer_decay": 0.5}
    rule = make_optimizer(model, name=name, **common | own)  # type: ignore[arg-type]
    found = rates(model, rule)
    top = {"inner.0.one.weight": 0.01, "inner.1.one.weight": 0.01} if name == "muon" else {}
    below = {"stem": 3, "blocks": 3, "inner.0": 2, "inner.1": 1, "norm": 0, "head": 0}
    for parameter, rate in found.items():
        steps = next(steps for part, steps in below.items() if parameter.startswith(f"{part}."))
        assert rate == pytest.approx(top.get(parameter, 0.1) * 0.5**steps), parameter
    assert rule.param_groups[0]["lr"] == 0.1, "the rate that is logged"
    assert {group["peak_lr"] for group in rule.param_groups} == {group["lr"] for group in rule.param_groups}
    decays = {
        parameter.dim() >= 2: group["weight_decay"]
        for group in rule.param_groups
        for parameter in group["params"]
    }
    assert decays == {True: 0.2, False: 0.0}


def test_a_network_without_blocks_has_its_layers_as_depths() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    found = rates(model, optimizer(model, "adamw", layer_decay=0.1))
    assert {name.split(".")[0]: rate for name, rate in found.items()} == {"0": 0.0003, "2": 0.003, "3": 0.03}


def test_muon_trains_every_depth() -> None:
    model = Deep()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    rule = make_optimizer(model, name="muon", learning_rate=0.1, weight_decay=0.2, layer_decay=0.5, **MUON)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    rule.step()
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == before.keys()
    state = rule.state_dict()
    rule.load_state_dict(state)
    rule.step()
