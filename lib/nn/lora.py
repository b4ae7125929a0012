"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021).

A layer with weight W computes W x + (alpha / rank) B A x, where A (rank, inputs) and B (outputs, rank) are
trained and W is not. The class of a layer is changed in place, so that names of weights stay.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lib.errors import ConfigError
from lib.nn.dropout import Dropout, dropouts
from lib.nn.four_bit import FourBitLinear, dense_weight
from lib.nn.precision import autocast_dtype
from lib.nn.weights import freeze_named, is_adapter, named_by
from lib.rng import key

ALL = "all-linear"
_LISTED = 3  # names in a message


class LoraLinear(nn.Linear):
    """Mix-in of a linear layer with an adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_dropout: Dropout | None
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        y = super().forward(x)
        if autocast_dtype(x) is None:
            x = x.to(self.lora_A.dtype)
        if self.lora_dropout is not None:
            x = self.lora_dropout(x)
        low = F.linear(x, self.lora_A) * self.lora_scale
        return y + F.linear(low, self.lora_B).to(y.dtype)


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the layers with an adapter, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


def adapt(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: str = ALL,
    train: str = "",
    head: str = "",
    trains_head: bool = False,
    four_bit: bool = False,
    seed: int = 0,
) -> None:
    """Add adapters to linear layers of `model` in place, and freeze all other weights.

    targets: patterns of names of layers; ALL for each but `head`. train: patterns of weights that are trained
    whole. four_bit: linear layers but the head may be stored in 4 bits (`lib.nn.four_bit.pack`). Adapters
    are float32, A is a function of `seed`, and B is 0. Raises ConfigError where there is no such layer, and
    for layers that are no nn.Linear.
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    weights = dict(model.named_parameters(remove_duplicate=False))
    of_head = {name for name in (*layers, *weights) if head and f"{name}.".startswith(f"{head}.")}
    chosen = _chosen(model, layers.keys(), targets, of_head)
    whole = named_by(train, weights, option="LORA_TRAIN")
    whole |= of_head & weights.keys() if trains_head else set()
    if twice := sorted(name for name in whole if name.rpartition(".")[0] in chosen):
        why = f"their layers have adapters: {_some(twice)}"
        todo = "leave them out of CONFIG_LORA_TRAIN, or the layers out of CONFIG_LORA_TARGETS"
        raise ConfigError("CONFIG_LORA_TRAIN names weights that adapters change", why=why, todo=todo)
    held = {id(weights[name]) for name in whole}  # by any of its names where it is tied
    norms = {name for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
    freeze_named(model, norms | {name for name, weight in weights.items() if id(weight) not in held})
    site = 1 + max((each.site for each in dropouts(model)), default=-1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key("lora", seed))
        for number, name in enumerate(name for name in layers if name in chosen):
            _add(layers[name], rank=rank, scale=alpha / rank, dropout=dropout, site=site + number)
    for name, layer in layers.items() if four_bit else ():
        if name not in of_head and id(layer.weight) not in held:
            _check_plain(name, layer)
            layer.__class__ = _subclass(FourBitLinear, cast(Any, type(layer)))


def _chosen(model: nn.Module, layers: Collection[str], targets: str, of_head: set[str]) -> set[str]:
    """Return the names of the layers that get an adapter. Raises ConfigError."""
    others = dict(_not_linear(model))
    if targets == ALL:
        chosen = {name for name in layers if name not in of_head} | others.keys()
    else:
        chosen = named_by(targets, {*layers, *others}, option="LORA_TARGETS", within=True)
    if named := sorted(chosen & of_head):
        why, todo = "a loss may read its weights without calling it", "name it in CONFIG_LORA_TRAIN"
        raise ConfigError(f"CONFIG_LORA_TARGETS names the head {_some(named)}", why=why, todo=todo)
    if refused := sorted(chosen & others.keys()):
        raise ConfigError(
            f"{_some(refused)} cannot have an adapter",
            why=f"an adapter is for nn.Linear, and {refused[0]} is {others[refused[0]]}",
            todo="name linear layers in CONFIG_LORA_TARGETS, or set CONFIG_ADAPT_FULL=y",
        )
    if not chosen:
        beside = f" beside its head {_some(sorted(of_head & {*layers}))}" if of_head & {*layers} else ""
        what = f"{type(model).__name__} has no linear layer for an adapter{beside}"
        raise ConfigError(what, todo="set CONFIG_ADAPT_FULL=y, and perhaps CONFIG_FREEZE")
    return chosen


def _not_linear(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield names and kinds of what multiplies by a matrix and is no linear layer."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            yield name, "a Conv1D of transformers"
        for own, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and min(weight.shape) > 1 and not isinstance(module, _ConvNd):
                yield f"{name}.{own}", f"a weight {tuple(weight.shape)} of experts in one"


def _add(layer: nn.Linear, *, rank: int, scale: float, dropout: float, site: int) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": layer.weight.device}
    layer.__class__ = _subclass(LoraLinear, cast(Any, type(layer)))
    layer.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, **options))
    layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, **options))
    nn.init.kaiming_uniform_(layer.lora_A, a=5**0.5)
    layer.register_module("lora_dropout", Dropout(dropout, site=site) if dropout else None)
    vars(layer)["lora_scale"] = scale


def _check_plain(name: str, layer: Any) -> None:
    kind = getattr(layer, "plain", type(layer))
    if kind.forward is not nn.Linear.forward:
        why = f"{kind.__name__} has a forward pass of its own"
        raise ConfigError(f"{name} cannot be stored in 4 bits", why=why, todo="set CONFIG_ADAPT_LORA=y")


@functools.cache
def _subclass(kind: Any, own: Any) -> Any:
    # An adapter goes first: it calls the layer, which may be in 4 bits.
    bases = (LoraLinear, kind, own.plain) if issubclass(own, LoraLinear) else (kind, own)
    plain = getattr(own, "plain", own)
    return type(f"{kind.__name__.removesuffix('Linear')}{plain.__name__}", bases, {"plain": plain})


def watch_use(model: nn.Module) -> set[str]:
    """Return the names of adapted layers, from which each forward pass removes those that it calls."""
    unused = set(adapted(model))

    def called(name: str) -> Any:
        return lambda *_: unused.discard(name)

    for name, layer in adapted(model).items():
        layer.register_forward_hook(called(name))
    return unused


def unused_error(unused: Collection[str]) -> ConfigError:
    """Return the error about adapters that no forward pass calls."""
    return ConfigError(
        f"the adapters of {_some(sorted(unused))} have no effect",
        why="the model reads the weights of these layers and does not call them",
        todo="leave them out of CONFIG_LORA_TARGETS",
    )


@torch.no_grad()
def halve(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen weights that linear layers alone hold in `dtype`, in place.

    Others stay: the rows of an embedding, for one, are what the layers after it compute with.
    """
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    others = [each for each in model.modules() if not isinstance(each, nn.Linear)]
    held = {id(weight) for each in others for weight in each.parameters(recurse=False)}
    for layer in linear:
        weight = layer._parameters.get("weight")
        if weight is not None and not weight.requires_grad and id(weight) not in held:
            halved = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
            for each in linear:  # weights of several layers stay tied
                if each._parameters.get("weight") is weight:
                    each._parameters["weight"] = halved


@torch.no_grad()
def merge(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Add the adapters to the weights, in float32 or more, in place; return the layers that were in 4 bits.

    The layers become what they were, with weights of the type that they had. dtype: all weights are then
    rounded to it.
    """
    restored = 0
    for layer in [each for each in model.modules() if isinstance(each, LoraLinear | FourBitLinear)]:
        restored += isinstance(layer, FourBitLinear)
        weight, own = dense_weight(layer)
        if isinstance(layer, LoraLinear):
            weight = weight + layer.lora_scale * (layer.lora_B.to(weight) @ layer.lora_A.to(weight))
            del layer.lora_A, layer.lora_B, layer.lora_dropout
        del layer.weight
        layer.weight = nn.Parameter(weight.to(own), requires_grad=False)
        layer.__class__ = cast(Any, layer.plain)
    for weight in model.parameters() if dtype is not None else ():
        weight.copy_(weight.to(dtype))
    return restored


def base_facts(model: nn.Module, *, rank: int, alpha: float, contents: bool) -> dict[str, Any]:
    """Return what adapters belong to: rank, scale, and SHA-256 of the frozen weights.

    "shapes" is of their names and shapes, and "weights", with `contents`, of their values in float32.
    """
    shapes, values = hashlib.sha256(type(model).__name__.encode()), hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if not weight.requires_grad:
            shapes.update(f"{name} {tuple(weight.shape)}".encode())
            if contents:
                values.update(weight.detach().cpu().float().contiguous().numpy().tobytes())
    known = {"rank": rank, "alpha": alpha, "shapes": shapes.hexdigest()}
    return known | ({"weights": values.hexdigest()} if contents else {})


def trained_names(model: nn.Module, given: Mapping[str, Tensor]) -> set[str]:
    """Return the names that stored adapters must have: what is trained, and what `given` holds beside it."""
    weights = model.named_parameters(remove_duplicate=False)
    trained = {name for name, weight in weights if weight.requires_grad}
    return trained | {name for name in given if not is_adapter(name) and name in model.state_dict()}


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join([*names][:_LISTED]) + more
