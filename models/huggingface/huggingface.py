"""Language models of transformers in their own layout: a directory like the one that they come from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lib.errors import ConfigError
from lib.nn.packages import import_extra
from models.huggingface.causal import Causal
from models.huggingface.model import EXTRA

# What makes a directory of weights usable, and what their licence asks for.
BESIDE = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
BESIDE += ("LICENSE*", "NOTICE*")


def require_package() -> Any:
    """Return the package. Raises ConfigError where it is not installed."""
    return import_extra(EXTRA)


def save(model: Any, path: str) -> None:
    """Write weights to `path` (model.safetensors), and beside it tokenizer and licence of the directory.

    Raises ConfigError for a model that is no language model.
    """
    if not isinstance(model, Causal):
        why = f"{type(model).__name__} is no causal language model"
        raise ConfigError(
            "FORMAT=huggingface is not possible", why=why, todo="FORMAT=safetensors writes weights"
        )
    place, own = Path(path).parent, Path(model.config._name_or_path)  # type: ignore[attr-defined]
    model.save_pretrained(place, max_shard_size=1 << 60)  # type: ignore[attr-defined]
    for pattern in BESIDE:
        for file in own.glob(pattern):
            shutil.copy(file, place)


def configuration(model: Any) -> dict[str, Any]:
    """Return the content of config.json."""
    content: dict[str, Any] = json.loads(model.config.to_json_string())
    return content


def from_huggingface(_: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError: weights of this model have the names of transformers anyway."""
    raise ConfigError(
        "no weight has a name of the model", why=f"the first is {next(iter(tensors), 'missing')}"
    )
