"""Update rules, with weight decay where it belongs and the fused kernels where there are any."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})  # "cuda" is ROCm's name in torch, too


def make_optimizer(
    model: nn.Module,
    *,
    name: Literal["sgd", "adam", "adamw"],
    learning_rate: float,
    weight_decay: float,
    momentum: float | None,
    nesterov: bool,
    adam_beta1: float | None,
    adam_beta2: float | None,
    adam_eps: float | None,
) -> torch.optim.Optimizer:
    """An optimizer over the trainable parameters of `model`, which is already on its device.

    Two groups: parameters of two or more dimensions, which decay, and the others (biases,
    normalisation), which do not. `learning_rate` is stored as it is given. What the rule
    does not use is None.
    """
    groups = _groups(model, weight_decay)
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in model.parameters())
    if name == "sgd":
        assert momentum is not None
        sgd = torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=nesterov, fused=fused)
        if momentum:
            _start_at_rest(sgd)
        return sgd
    assert adam_beta1 is not None and adam_beta2 is not None and adam_eps is not None
    rule = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return rule(groups, lr=learning_rate, betas=(adam_beta1, adam_beta2), eps=adam_eps, fused=fused)


def _start_at_rest(optimizer: torch.optim.SGD) -> None:
    """Begin with a momentum of zero: the first step is the same, g = momentum * 0 + g.

    torch's fused rule would allocate it in the first step without filling it, and where loss
    scaling skips that step, the second one takes whatever was in memory for the momentum.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
