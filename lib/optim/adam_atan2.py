"""Adam with the arctangent in place of the division (Everett et al. 2024), as used by TRM.

p <- (1 - lr wd) p;  m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
p <- p - lr / (1 - b1^t) * atan2(m, sqrt(v / (1 - b2^t))).

There is no epsilon, and the update is invariant to the scale of the gradients. (Other versions scale the
arctangent and correct m inside it, which is not the same.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from lib.devices.base import send
from lib.optim import Compiler

_State: TypeAlias = tuple[Tensor, Tensor, Tensor]  # step, mean and square


@runtime_checkable
class HasSignParameters(Protocol):
    """A model with parameters that are updated by the sign of their gradient, and are not averaged."""

    def sign_parameters(self) -> list[nn.Parameter]:
        """Return those parameters: few examples touch each, so the size of a gradient says little."""


def sign_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the sign-updated parameters of `model`, if it names any."""
    return model.sign_parameters() if isinstance(model, HasSignParameters) else []


class AdamATan2(torch.optim.Optimizer):
    """Adam-atan2; groups with "sign" follow p <- (1 - lr wd) p - lr sign(g), the others the module's formula.

    The learning rate and the step number are tensors, so that a whole-graph compiler sees one graph.
    compiler: compiles the update of a group.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0, "sign": False})
        self._update = compiler(_update) if compiler else _update

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state; its tensors go to the devices of the parameters."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():  # torch leaves "step" where it was
            if "step" in state:
                state["step"] = state["step"].to(parameter.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Raises ValueError for a closure."""
        if closure is not None:
            raise ValueError("AdamATan2 takes no closure")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            first = parameters[0]
            rate = send(torch.tensor(group["lr"], dtype=_exact(first.dtype)), first.device)
            states = [None if group["sign"] else self._state_of(parameter) for parameter in parameters]
            gradients = [parameter.grad for parameter in parameters]
            self._update(parameters, gradients, states, rate, group["weight_decay"], group["betas"])

    def _state_of(self, parameter: nn.Parameter) -> _State:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=_exact(parameter.dtype), device=parameter.device)
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state["step"], state["mean"], state["square"]


def _update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[_State | None],
    rate: Tensor,
    weight_decay: float,
    betas: tuple[float, float],
) -> None:
    """Update `parameters` and their states in place. states: None for those that follow the sign."""
    kept = 1 - rate * weight_decay
    for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
        parameter.mul_(kept)
        direction = gradient.sign() if state is None else _direction(gradient, *state, *betas)
        parameter.sub_(rate * direction)


def _direction(
    gradient: Tensor, step: Tensor, mean: Tensor, square: Tensor, beta1: float, beta2: float
) -> Tensor:
    step += 1
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / (1 - beta2**step)).sqrt_()
    return torch.atan2(mean, root).div_(1 - beta1**step)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
