"""Models of transformers in their own layout: a directory like the one that they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lib.errors import ConfigError
from lib.nn.packages import import_extra
from models.huggingface.library import EXTRA


def require_package() -> Any:
    """Return the package. Raises ConfigError where it is not installed."""
    return import_extra(EXTRA)


def save(model: Any, path: str) -> None:
    """Write weights to `path`, which ends in model.safetensors, and its configuration beside it."""
    model.save_pretrained(path.removesuffix("model.safetensors"), max_shard_size=1 << 60)


def configuration(model: Any) -> dict[str, Any]:
    """Return the content of config.json."""
    content: dict[str, Any] = json.loads(model.config.to_json_string())
    return content


def from_huggingface(_: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError: weights of this model have the names of transformers anyway."""
    raise ConfigError(
        "no weight has a name of the model", why=f"the first is {next(iter(tensors), 'missing')}"
    )
