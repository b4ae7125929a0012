"""Adam with an arctangent: the formula in plain numbers, and what follows from it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lib.optim.adam_atan2 import AdamATan2, sign_parameters
from lib.optim.factory import make_optimizer

GRADIENTS = [0.3, -0.01, 2.0, 0.0, -0.5]


class Model(nn.Module):
    """A matrix, a bias, and a row that follows the sign."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.full((1, 1), 0.75)), nn.Parameter(torch.full((1,), -0.25))
        self.row = nn.Parameter(torch.full((1, 1), 0.125))

    def sign_parameters(self) -> list[nn.Parameter]:
        return [self.row]


def trained(*, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, float]:
    model = Model().to(dtype)
    optimizer = make_optimizer(
        model,
        name="adam_atan2",
        learning_rate=0.05,
        weight_decay=0.4,
        momentum=None,
        nesterov=False,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=None,
        sign_learning_rate=0.01,
    )
    for number, gradient in enumerate(GRADIENTS):
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * (1 + number)  # as a schedule does
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient * scale)
        optimizer.step()
    return {name: parameter.item() for name, parameter in model.named_parameters()}


def by_hand(start: float) -> float:
    value, mean, square = start, 0.0, 0.0
    for number, gradient in enumerate(GRADIENTS):
        rate, step = 0.05 * (1 + number), number + 1
        value *= 1 - rate * 0.4
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        root = math.sqrt(square) / math.sqrt(1 - 0.95**step)
        value -= rate / (1 - 0.9**step) * math.atan2(mean, root)
    return value


def test_it_is_the_formula_and_every_parameter_decays() -> None:
    found = trained()
    assert found["weight"] == pytest.approx(by_hand(0.75), rel=1e-12)
    assert found["bias"] == pytest.approx(by_hand(-0.25), rel=1e-12)


def test_the_row_follows_the_sign() -> None:
    value = 0.125
    for number, gradient in enumerate(GRADIENTS):
        rate = 0.01 * (1 + number)
        value = value * (1 - rate * 0.4) - rate * (gradient > 0) + rate * (gradient < 0)
    assert trained()["row"] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("scale", [1 / 8, 1 / 64, 1024.0])
def test_the_scale_of_gradients_does_not_matter_to_the_bit(scale: float) -> None:
    assert trained(scale=scale, dtype=torch.float32) == trained(dtype=torch.float32)


def test_the_first_step_is_almost_the_rate() -> None:
    """atan2(0.1 g, |g|) / 0.1, which is just below 1: not that of the versions that correct m inside."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = AdamATan2([{"params": [parameter]}], lr=1.0, betas=(0.9, 0.95))
    parameter.grad = torch.full_like(parameter, -3.0)
    optimizer.step()
    assert parameter.item() == pytest.approx(math.atan(0.1) / 0.1, rel=1e-12)


def test_a_state_goes_on_to_the_bit() -> None:
    def optimizer_of(parameter: nn.Parameter) -> AdamATan2:
        return AdamATan2([{"params": [parameter]}], lr=0.1, betas=(0.9, 0.95))

    first = nn.Parameter(torch.ones(3))
    optimizer = optimizer_of(first)
    for gradient in (0.1, -0.2):
        first.grad = torch.full_like(first, gradient)
        optimizer.step()
    second = nn.Parameter(first.detach().clone())
    other = optimizer_of(second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, rule in ((first, optimizer), (second, other)):
        parameter.grad = torch.full_like(parameter, 0.3)
        rule.step()
    assert torch.equal(first, second)


def test_a_loaded_state_is_on_the_devices_of_the_parameters() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = AdamATan2([{"params": [parameter]}], lr=0.1, betas=(0.9, 0.95))
    optimizer.step()
    elsewhere = nn.Parameter(torch.ones(2, 2, device="meta"))  # any device but that of the state
    other = AdamATan2([{"params": [elsewhere]}], lr=0.1, betas=(0.9, 0.95))
    other.load_state_dict(optimizer.state_dict())
    assert {name: value.device.type for name, value in other.state[elsewhere].items()} == {
        "step": "meta",
        "mean": "meta",
        "square": "meta",
    }


def test_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="no closure"):
        AdamATan2([{"params": [nn.Parameter(torch.ones(1))]}], lr=0.1, betas=(0.9, 0.9)).step(lambda: 0.0)  # type: ignore[arg-type]


def test_what_follows_the_sign_is_known_by_its_model() -> None:
    model = Model()
    assert sign_parameters(model) == [model.row] and sign_parameters(nn.Linear(1, 1)) == []
