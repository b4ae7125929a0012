"""Freezing of weights: what is named is not trained, and its batch normalisation keeps its statistics."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lib.errors import ConfigError
from lib.nn.batch_norm import FrozenNorm
from lib.nn.weights import close_text, matching


def freeze(model: nn.Module, patterns: str) -> None:
    """Freeze the weights whose names `patterns` match (`lib.nn.weights.matching`), in place.

    A batch normalisation is frozen with all its weights, or by its name if it has none. Raises ConfigError
    for a pattern that matches nothing, and where no weight is left to train.
    """
    weights, norms = dict(model.named_parameters(remove_duplicate=False)), dict[str, _BatchNorm]()
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            norms[name] = module
    found = matching(patterns, {**weights, **norms})
    for pattern in (pattern for pattern, names in found.items() if not names):
        what = f"CONFIG_FREEZE: no weight matches {pattern}"
        raise ConfigError(what, why=close_text(pattern, weights), todo="correct or remove it")
    named = {name for names in found.values() for name in names}
    for name in named & weights.keys():
        weights[name].requires_grad_(False)
    for name, norm in norms.items():
        own = list(norm.parameters())
        if not any(weight.requires_grad for weight in own) if own else name in named:
            norm.__class__ = _frozen(type(norm))
            norm.eval()
    if not any(weight.requires_grad for weight in weights.values()):
        why = f"{patterns} matches all {len(weights)} weights"
        raise ConfigError("CONFIG_FREEZE leaves nothing to train", why=why, todo="do not freeze the head")


@functools.cache
def _frozen(kind: type[_BatchNorm]) -> Any:
    return type(f"Frozen{kind.__name__}", (FrozenNorm, kind), {})
