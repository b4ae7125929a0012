"""The models there are: every directory under models/ that has a model.py. There is no list."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from lib.data.types import Spec
from lib.errors import ConfigError
from lib.kconf.values import Value

_IMPORT = re.compile(r"^\s*from models\.(\w+)\.", re.MULTILINE)
MODELS_DIR = Path(__file__).resolve().parents[1] / "models"


class ModelModule(Protocol):
    """What models/<name>/model.py must define."""

    TASK: str  # the kind of learning: a file of train/
    Options: type[Any]  # a frozen dataclass; its fields are the model's own symbols
    build: Callable[[Any, Any], nn.Module]  # of Options and the spec of the data that it takes


def model_names() -> tuple[str, ...]:
    """Names of all models, sorted."""
    return tuple(sorted(path.parent.name for path in MODELS_DIR.glob("*/model.py")))


def sources_of(root: Path, *models: str) -> list[Path]:
    """The sources of the tree at `root` that training `models` may run, sorted: none of other models.

    A model that the code shared by all, or one of `models`, imports is one of them.
    """
    shared = [path for folder in ("lib", "train") for path in _sources(root / folder)]
    shared += [*root.glob("Kconfig"), *(root / "models").glob("*.py")]
    own = [path for model in models for path in _sources(root / "models" / model)]
    text = "".join(path.read_text(encoding="utf-8") for path in [*shared, *own] if path.suffix == ".py")
    imported = set(_IMPORT.findall(text)) - set(models)
    return sorted({*shared, *own, *(path for name in imported for path in _sources(root / "models" / name))})


def _sources(folder: Path) -> list[Path]:
    return [path for kind in ("*.py", "Kconfig") for path in folder.rglob(kind)]


def load_model(name: str) -> ModelModule:
    """Import models/`name`/model.py. Raises ConfigError if there is none or it lacks a definition."""
    names = model_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        todo = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        raise ConfigError(f"there is no model {name!r} under models/", todo=todo)
    module = importlib.import_module(f"models.{name}.model")
    missing = [symbol for symbol in ("TASK", "Options", "build") if not hasattr(module, symbol)]
    if missing:
        raise ConfigError(f"models/{name}/model.py does not define {', '.join(missing)}")
    return cast(ModelModule, module)


class Layout(Protocol):
    """What models/<name>/huggingface.py must define, where there is one."""

    save: Callable[[Any, str], None]  # of the model and the path of a safetensors file
    load: Callable[[Any, str], None]
    configuration: Callable[[Any], dict[str, Any]]  # of the model: the contents of config.json


def load_layout(name: str) -> Layout:
    """Import models/`name`/huggingface.py. Raises ConfigError if there is none."""
    if not (MODELS_DIR / name / "huggingface.py").is_file():
        raise ConfigError(f"the weights of {name} have no layout in Hugging Face transformers")
    return cast(Layout, importlib.import_module(f"models.{name}.huggingface"))


def build_model(name: str, options: Mapping[str, Value], spec: Spec, *, seed: int) -> nn.Module:
    """Build model `name` with initial weights that are a function of `seed` alone.

    options: values of the model's own symbols without their prefix, lower case. The weights are
    drawn by the CPU's generator, whose state is left as it was, on the device that is torch's
    default; build on the CPU and move the model, so that all devices start from the same weights.
    Raises ConfigError where `options` are not exactly those that the model declares.
    """
    module = load_model(name)
    declared = {field.name for field in dataclasses.fields(module.Options)}
    problems = _symbols("are not set", name, declared - set(options))
    problems += _symbols("are not known to the model", name, set(options) - declared)
    if problems:
        raise ConfigError(
            f"models/{name}/model.py and models/{name}/Kconfig disagree",
            why=" and ".join(problems),
            todo="make the fields of Options the model's own symbols",
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return module.build(module.Options(**options), spec)


def _symbols(fault: str, model: str, options: Iterable[str]) -> list[str]:
    names = sorted(f"CONFIG_{model}_{option}".upper() for option in options)
    return [f"{', '.join(names)} {fault}"] if names else []
