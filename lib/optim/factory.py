"""Construction of optimizers: weight-decay groups, and fused kernels where available."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from lib.distributed.fsdp import blocks_of, is_sharded, local_shard, shard_optimizer_state
from lib.errors import ConfigError
from lib.optim import Compiler

FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})  # torch's "cuda" includes ROCm


@runtime_checkable
class Constrained(Protocol):
    """A model whose weights are kept within bounds."""

    def constrain_weights(self) -> None:
        """Project the weights back into their bounds, in place. Called after every update."""


def make_optimizer(
    model: nn.Module,
    *,
    name: Literal["sgd", "adam", "adamw", "muon", "adam_atan2"],
    learning_rate: float,
    weight_decay: float,
    momentum: float | None,
    nesterov: bool,
    adam_beta1: float | None,
    adam_beta2: float | None,
    adam_eps: float | None,
    adam_8bit: bool = False,
    layer_decay: float = 1.0,
    muon_learning_rate: float | None = None,
    sign_learning_rate: float | None = None,
    product_dtype: torch.dtype | None = None,
    shard_state: bool = False,
    compiler: Compiler | None = None,
) -> torch.optim.Optimizer:
    """Create an optimizer for the trainable parameters of `model`, which is already on its device.

    Two groups: parameters of two or more dimensions, which decay, and the others, which do not. Muon moves
    the model's hidden matrices into a third with `muon_learning_rate`; the other two follow AdamW. With
    Adam-atan2 all parameters decay, and sign-updated ones are a second group with `sign_learning_rate`.
    A `layer_decay` below 1 splits each by depth. Rates are stored as "lr" and, for schedules, "peak_lr". What
    the rule does not use is None. A model that is Constrained is projected into its bounds after every step.

    adam_8bit: of Adam and AdamW, the state is in 8 bits. product_dtype: of Muon's matrix products; None: that
    of the weights. shard_state: each rank keeps the state of some weights, updates them and sends them to the
    others. compiler: of updates without a fused kernel in torch (Adam-atan2, 8 bits, matrices of Muon).
    Raises ConfigError for Muon and a model that does not name its hidden matrices.
    """
    split = functools.partial(_split_by_depth, model=model, rate=learning_rate, decay=layer_decay)
    if name == "adam_atan2":
        from lib.optim.adam_atan2 import AdamATan2

        assert adam_beta1 is not None and adam_beta2 is not None
        groups = split(_atan2_groups(model, weight_decay, sign_learning_rate=sign_learning_rate))
        known: dict[str, Any] = {"betas": (adam_beta1, adam_beta2), "compiler": compiler}
        return _prepared(AdamATan2(groups, lr=learning_rate, **known), model)
    hidden = _hidden(model) if name == "muon" else []
    groups = split(_groups(model, weight_decay, hidden))
    rule: type[torch.optim.Optimizer] = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    options: dict[str, Any] = {"betas": (adam_beta1, adam_beta2), "eps": adam_eps}
    if name == "sgd":
        rule, options = torch.optim.SGD, {"momentum": momentum, "nesterov": nesterov}
    assert None not in options.values() and None not in options.get("betas", ())
    options["lr"] = learning_rate
    if adam_8bit:
        return _prepared(_in_8_bits(groups, name, options | {"compiler": compiler}), model)
    options["fused"] = _can_fuse(groups, rule)
    optimizer = shard_optimizer_state(groups, rule, options) if shard_state else rule(groups, **options)
    if name == "sgd" and momentum:
        _start_at_rest(local_shard(optimizer))
    if name == "muon":
        own: dict[str, Any] = {"learning_rate": muon_learning_rate, "weight_decay": weight_decay}
        own |= {"momentum": momentum, "nesterov": nesterov, "product_dtype": product_dtype}
        optimizer = _with_muon(hidden, optimizer, compiler=compiler, **own)
        optimizer.param_groups[-1:] = split(optimizer.param_groups[-1:])
    return _prepared(optimizer, model)


def _with_muon(
    hidden: list[nn.Parameter], rest: torch.optim.Optimizer, **options: Any
) -> torch.optim.Optimizer:
    from lib.optim.muon import Muon

    assert isinstance(rest, torch.optim.AdamW)
    assert None not in (options["learning_rate"], options["momentum"])
    return Muon(hidden, rest, **options)


def _in_8_bits(groups: list[dict[str, Any]], name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    from lib.optim.adam_8bit import Adam8bit

    assert name in ("adam", "adamw")
    return Adam8bit(groups, decoupled=name == "adamw", **options)


def _prepared(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Add the peak rates, and the hook that keeps the model's weights in bounds."""
    peaks = [group["lr"] for group in optimizer.param_groups]

    def fill_in(loaded: torch.optim.Optimizer) -> None:
        """Give states of versions without stored peaks the current ones."""
        for group, peak in zip(loaded.param_groups, peaks, strict=True):
            group.setdefault("peak_lr", peak)

    fill_in(optimizer)
    optimizer.register_load_state_dict_post_hook(fill_in)
    if isinstance(model, Constrained):
        constrain = model.constrain_weights
        optimizer.register_step_post_hook(lambda *_: constrain())
    return optimizer


def _can_fuse(groups: list[dict[str, Any]], rule: type[torch.optim.Optimizer]) -> bool:
    """Return whether the fused kernel supports the parameters; that of SGD does not support sharded ones."""
    parameters = [parameter for group in groups for parameter in group["params"] if not parameter.is_meta]
    if rule is torch.optim.SGD and any(is_sharded(parameter) for parameter in parameters):
        return False
    return bool(parameters) and all(each.device.type in FUSED_DEVICES for each in parameters)


def _start_at_rest(optimizer: torch.optim.Optimizer) -> None:
    """Initialize momentum to zero: the first step is the same, g = momentum * 0 + g.

    torch's fused rule would allocate it in the first step without filling it; if loss scaling
    skips that step, the second would use uninitialized memory as the momentum.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.is_meta:  # a weight of another stage
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _hidden(model: nn.Module) -> list[nn.Parameter]:
    from lib.optim.muon import HasHiddenMatrices

    if not isinstance(model, HasHiddenMatrices):
        raise ConfigError(
            f"{type(model).__name__} does not name its hidden matrices, which Muon is for",
            todo="choose another optimizer (CONFIG_OPTIMIZER_*)",
        )
    hidden = [matrix for matrix in model.hidden_matrices() if matrix.requires_grad]
    shapes = [tuple(matrix.shape) for matrix in hidden if matrix.dim() < 2]
    if shapes:
        raise ConfigError(
            f"hidden_matrices of {type(model).__name__} names a weight of shape {shapes[0]}",
            why="Muon is for matrices",
            todo="leave it out, or choose another optimizer (CONFIG_OPTIMIZER_*)",
        )
    return hidden


def _atan2_groups(
    model: nn.Module, weight_decay: float, *, sign_learning_rate: float | None
) -> list[dict[str, Any]]:
    from lib.optim.adam_atan2 import sign_parameters

    by_sign = [parameter for parameter in sign_parameters(model) if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": _trained(model, by_sign), "weight_decay": weight_decay}]
    if by_sign:
        if sign_learning_rate is None:
            raise ConfigError(
                f"{type(model).__name__} names sign_parameters, and there is no CONFIG_SIGN_LEARNING_RATE",
                todo="select MODEL_LEARNS_RECURSIVELY in the model's Kconfig, or choose another optimizer",
            )
        groups.append(groups[0] | {"params": by_sign, "lr": sign_learning_rate, "sign": True})
    return groups


def _groups(model: nn.Module, weight_decay: float, leave_out: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    rest = _trained(model, leave_out)
    return [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]


def _split_by_depth(
    groups: list[dict[str, Any]], *, model: nn.Module, rate: float, decay: float
) -> list[dict[str, Any]]:
    """Split groups by the depth of their weights, the largest first: each below has `decay` times its rate.

    rate: of the largest depth in groups without "lr".
    """
    if decay == 1:
        return groups
    depth_of, found = depths(model), []
    last = max(depth_of.values())
    for group in groups:
        for depth in range(last, -1, -1):
            weights = [weight for weight in group["params"] if depth_of[id(weight)] == depth]
            if weights or depth == last:  # the first group tells the learning rate
                own = {"params": weights, "lr": group.get("lr", rate) * decay ** (last - depth)}
                found.append(group | own)
    return found


def depths(model: nn.Module) -> dict[int, int]:
    """Return the depth of each weight by its id: 0 before the first block, the largest for the head.

    Blocks are the composed members of lists (`blocks_of`); without any, modules with weights of their own.
    Their order is that of registration, as is what is before the first and after the last one.
    """
    blocks = [list(block.parameters()) for block in blocks_of(model)]
    if not blocks:
        own = [list(module.parameters(recurse=False)) for module in model.modules()]
        blocks = [weights for weights in own if weights][1:]
    of_block = {id(weight): number for number, weights in enumerate(blocks, start=1) for weight in weights}
    found, depth = dict[int, int](), 0
    for weight in model.parameters():
        depth = of_block.get(id(weight), depth + (depth == len(blocks)))
        found[id(weight)] = depth
    return found


def _trained(model: nn.Module, leave_out: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    without = {id(parameter) for parameter in leave_out}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in without]
