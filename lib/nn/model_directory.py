"""Local directories of models of Hugging Face transformers."""

from __future__ import annotations

import json
from pathlib import Path

from lib.errors import ConfigError, os_errors
from lib.plugin_folders import ROOT


def open_directory(name: str, *, symbol: str) -> tuple[Path, str, tuple[str, ...]]:
    """Return the directory called `name`, the model type in its config.json, and its files of weights.

    symbol: that has the name. A relative path starts at the source tree. Raises ConfigError where there is no
    such model, for one that needs code of its own, and for quantized weights.
    """
    requested = f'{symbol}="{name}"'
    if not name:
        raise ConfigError(f"{symbol} is empty", todo="set it to a local directory with a config.json")
    folder = (ROOT / Path(name).expanduser()).resolve()
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "it does not exist, and models are not downloaded"
        raise ConfigError(
            f"{requested} is no local directory", why=why, todo="give one that has a config.json"
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{requested} has no config.json", todo="give the directory that has it")
    with os_errors("read"):
        text = file.read_text(encoding="utf-8", errors="replace")
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        others = sorted(path.name for path in folder.glob("*.bin"))
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON", why=str(error)) from error
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{file} has no model_type", todo="give the directory of a model of transformers")
    if "auto_map" in values:
        why = f"auto_map names code for {kind}, and code of a model directory is never run"
        raise ConfigError(f"{file} asks for code", why=why, todo="use a model whose class is in transformers")
    if "quantization_config" in values:
        raise ConfigError(f"{file} is of quantized weights", todo="give the directory of the full weights")
    if others and not files:
        todo = "convert it to safetensors, or remove it to start from random weights"
        raise ConfigError(
            f"{folder / others[0]} is a pickle, and weights are read from safetensors", todo=todo
        )
    return folder, kind, tuple(files)
