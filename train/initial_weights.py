"""The weights that training starts from: CONFIG_INITIAL_WEIGHTS, or what a model computes from samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lib import plugin_folders
from lib.config import Config
from lib.data.loader import EvalLoader, LoaderConfig
from lib.data.types import Dataset, Spec
from lib.devices.base import Backend
from lib.errors import ConfigError
from lib.kconf import values_from_json
from lib.kconf.reader import foremost
from lib.nn import lora
from lib.nn import weights as stored
from lib.nn.model_code import ModelCode, build_model, load_layout, load_model
from lib.plugins import MODELS
from lib.runs.directory import RunDir
from lib.runs.weight_files import OPTION, WeightFiles, find_weights

FIRST_SAMPLES = 512  # that `initialise_from_samples` of a model sees


def initial_weights(config: Config, root: Path) -> WeightFiles | None:
    """Return the files that training starts from, None for random weights. A relative path starts at `root`.

    Raises ConfigError where there is nothing that can be read.
    """
    if not config.weights.initial_weights:
        return None
    folders = (config.weights.weights_dir, config.data_dir or "")
    return find_weights(config.weights.initial_weights, root=root, folders=folders)


def initialise_from_samples(
    model: nn.Module, config: Config, dataset: Dataset, backend: Backend, *, log: Callable[[str], object]
) -> None:
    """Load into `model` the weights that its file computes from the first training samples, by index.

    Rank 0 computes them, for other machines may round otherwise. Collective; a checkpoint has the result.
    """
    weights: Mapping[str, Tensor] | None = None
    count = min(FIRST_SAMPLES, dataset.train.size)
    with ModelCode(config.model, torchs=True):
        if backend.is_main:
            loader_config = LoaderConfig(device=torch.device("cpu"))
            with EvalLoader(dataset.train, dataset.spec, loader_config) as loader:
                batch = next(loader.batches(rank=0, world=1, batch_size=count))
            weights = load_model(config.model).initialise_from_samples(model, batch.inputs)  # type: ignore[attr-defined]
        weights = backend.broadcast(weights)
        assert weights is not None
        stored.load(model, weights)
    log(f"Weights: {', '.join(weights)} of the first {count} training samples")


def check_weights(config: Config, spec: Spec, root: Path, *, log: Callable[[str], object]) -> None:
    """Check that the weights fit the model, and log what matches. Raises ConfigError where they do not."""
    found = initial_weights(config, root)
    if found is not None:
        # Only the layout of another program needs a model with numbers.
        with torch.device("cpu" if _has_layout(config.model) else "meta"):
            model = build_model(config.model, config.model_options, spec, seed=config.seed)
            if config.weights.adapt != "full":
                from train.adapters import add

                add(model, config, spec)
        log(f"Initial weights: {found}: {_load(model, found, config)}")


def load_weights(
    model: nn.Module, found: WeightFiles, config: Config, *, log: Callable[[str], object]
) -> None:
    """Load the weights in `found` into `model`. Raises ConfigError where they do not fit."""
    text = _load(model, found, config)
    log(f"Weights: {found}, SHA-256 {found.digest(cache=plugin_folders.ROOT / 'data')[:16]}: {text}")


def _has_layout(name: str) -> bool:
    return (plugin_folders.ROOT / "models" / name / "huggingface.py").is_file()


def _load(model: nn.Module, found: WeightFiles, config: Config) -> str:
    """Load weights into `model`, or compare alone on the meta device; return what matches."""
    given, fault = stored.read_weights(found), f"{OPTION}={found.path}"
    bad = [name for name, each in given.items() if each.is_floating_point() and not each.isfinite().all()]
    if bad:
        why = f"{bad[0]} has values that are not finite{f', and {len(bad) - 1} more' if bad[1:] else ''}"
        raise ConfigError(f"{fault} cannot be used", why=why, todo="name an earlier checkpoint")
    base, only = "", None
    if any("lora_" in name for name in given):
        from train import adapters

        given = adapters.own_names(given)
        if config.weights.adapt == "full":
            todo = "set CONFIG_ADAPT_LORA=y, or merge them first: make export MERGE=y"
            raise ConfigError(f"{fault} has adapters, and CONFIG_ADAPT_FULL=y", todo=todo)
        if (below := adapters.base_of(found, config)) is not None:
            base = f"base {below}: {_load(model, below, config)}; adapters: "
        base += adapters.check_fit(model, found, config)
        only = lora.trained_names(model, given)
    if _has_layout(config.model) and not given.keys() & model.state_dict().keys() and only is None:
        return _load_layout(model, given, fault, config)
    head = stored.head_of(model, getattr(load_model(config.model), "HEAD", None))
    new = head if config.weights.reset_head else ""
    matched = stored.match(model, given, head=new, allow=config.weights.initial_weights_allow, only=only)
    if config.weights.reset_head and not matched.new:
        todo = f"set it to n, or name the head in models/{config.model}/model.py: HEAD = ..."
        raise ConfigError("CONFIG_RESET_HEAD=y: the model has no head of its own", todo=todo)
    if lines := list(matched.faults.values()):
        todo = "use weights of this model, or name what may differ in CONFIG_INITIAL_WEIGHTS_ALLOW"
        if head and all(name.startswith(f"{head}.") for name in matched.faults):
            todo = "CONFIG_RESET_HEAD=y starts with a new head"
        elif trained := _trained_otherwise(found, config):
            todo = f"{trained}; {todo}"
        elif "dir" in config.model_options and (found.path / "config.json").is_file():
            todo = f"set CONFIG_HUGGINGFACE_DIR={found.path} without it, which knows other names; {todo}"
        why = f"{lines[0]}{f', and {len(lines) - 1} more' if lines[1:] else ''}; {matched}"
        findings = foremost(lines, "differences") if lines[1:] else []
        raise ConfigError(f"{fault} does not fit the model", why=why, todo=todo, findings=findings)
    stored.load(model, matched.weights)
    return f"{base}{matched}"


def _trained_otherwise(found: WeightFiles, config: Config) -> str:
    """Return the model, or options of it, of the run whose weights are `found` where `config` has others."""
    if found.checkpoint is None:
        return ""
    from lib.runs.index import objects_of  # a run without initial weights does not import it

    values = objects_of(RunDir(found.checkpoint[0].parent), "values")[0]["values"]
    if (name := values.get("MODEL", config.model)) != config.model:
        return f"the run trained {name}"
    own = MODELS.own(name, values_from_json(values))
    differ = {field: value for field, value in own.items() if value != config.model_options[field]}
    settings = [
        f"{symbol} is {json.dumps(differ[field])} there and {json.dumps(config.model_options[field])} here"
        for symbol, field in plugin_folders.symbols_of(MODELS.home(name)).items()
        if field in differ
    ]
    return f"configure the model of the run: {', '.join(settings)}" if settings else ""


def _load_layout(model: nn.Module, given: Mapping[str, Tensor], fault: str, config: Config) -> str:
    """Load weights in the layout of Hugging Face transformers, where the model has one."""
    if config.weights.reset_head or config.weights.initial_weights_allow:
        what = f"CONFIG_RESET_HEAD and CONFIG_INITIAL_WEIGHTS_ALLOW have no effect on {fault}"
        why = "all weights in the layout of Hugging Face transformers are read, and none has a head"
        raise ConfigError(what, why=why, todo="leave them out")
    try:
        with ModelCode(config.model):
            load_layout(config.model).from_huggingface(model, given)
    except ConfigError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        findings = error.findings
        raise ConfigError(f"{fault} cannot be used", why=why, todo=error.todo, findings=findings) from error
    return f"{len(given)} tensors in the layout of Hugging Face transformers"
