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
