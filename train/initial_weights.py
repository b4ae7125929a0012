"""The weights that training starts from: CONFIG_INITIAL_WEIGHTS, or what a model computes from samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib import plugin_folders
from lib.config import Config
from lib.data.loader import EvalLoader, LoaderConfig
from lib.data.types import Dataset, Spec
from lib.devices.base import Backend
from lib.errors import ConfigError, ToolkitError, foremost, os_errors
from lib.kconf import values_from_json
from lib.nn import lora
from lib.nn import weights as stored
from lib.nn.model_code import ModelCode, build_model, load_layout, load_model
from lib.plugins import MODELS
from lib.runs.directory import RunDir
from lib.runs.weight_files import OPTION, WeightFiles, find_weights
from lib.units import setting

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
        _check_computed(weights, model, config)
        stored.load(model, weights)
    log(f"Weights: {', '.join(weights)} of the first {count} training samples")


def _check_computed(weights: Any, model: nn.Module, config: Config) -> None:
    """Raise ConfigError unless `weights` are some of `model`, by their names."""
    tensors = [(name, each) for name, each in model.state_dict().items() if isinstance(each, Tensor)]
    known, fault = {name: tuple(weight.shape) for name, weight in tensors}, ""
    if not isinstance(weights, Mapping):
        fault = f"{type(weights).__name__}, not weights by name"
    elif unknown := [name for name in weights if name not in known]:
        fault = f"{unknown[0]!r}, which the model does not have"
    elif other := [name for name, weight in weights.items() if getattr(weight, "shape", None) != known[name]]:
        given = weights[other[0]]
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        fault = f"{other[0]} {shape}, not {known[other[0]]}"
    if fault:
        place = f"{MODELS.place(config.model)}/model.py"
        raise ConfigError(f"{place}: initialise_from_samples returns {fault}")


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


def check_tokens(config: Config, dataset: Dataset, root: Path, *, log: Callable[[str], None]) -> None:
    """Raise ConfigError where the weights are of a run whose tokens stand for other texts than the data's.

    Raises ToolkitError where that cannot be read.
    """
    found, own = initial_weights(config, root), dataset.tokenizer
    if found is None or found.checkpoint is None or own is None:
        return
    run = RunDir(found.checkpoint[0].parent)
    if not (run.path / "preprocess.json").exists():  # of an older version
        log(f"note: {run.path} does not say which tokens its weights are for; they are not compared")
        return
    theirs = run.read_json("preprocess").get("tokenizer")
    by_folder = own.name == "huggingface" and theirs is not None and theirs["name"] == own.name
    if theirs and not by_folder and theirs != own.to_json():  # a folder may have moved
        raise ConfigError(
            f"{OPTION}={found.path} has weights for other tokens than the data",
            why=f"its run has a tokenizer {theirs['name']}, the data {own.name} with other tokens",
            todo="use data in its tokens, or weights by make export FORMAT=safetensors, which have none",
        )


def check_untrained(name: str, base: Config, base_spec: Spec, config: Config, spec: Spec) -> None:
    """Check that weights that are to be trained for `config` will fit its model, by names and shapes.

    name: CONFIG_INITIAL_WEIGHTS. base: the configuration that it names; each spec is of the data of one.
    Raises ConfigError where they do not fit.
    """
    if base.weights.adapt != "full":
        return  # its checkpoint has adapters alone
    with torch.device("meta"):
        theirs = build_model(base.model, base.model_options, base_spec, seed=base.seed)
        model = build_model(config.model, config.model_options, spec, seed=config.seed)
        if config.weights.adapt != "full":
            from train.adapters import add

            add(model, config, spec)
    _load(model, WeightFiles(path=Path(name)), config, untrained=(theirs.state_dict(), base))


def check_head(config: Config, dataset: Dataset) -> None:
    """Check that the head in a model's own directory is one for the classes of `dataset`.

    Raises ConfigError where it is not and CONFIG_RESET_HEAD is not set, or is set where it has no effect.
    """
    folder = config.model_options["dir"]
    with torch.device("meta"):
        model = build_model(config.model, config.model_options, dataset.spec, seed=config.seed)
    fault = getattr(model, "head_fault", None)
    if config.weights.reset_head:
        if fault is None:
            why = f"{folder} has no weights, or its model has no head for classes"
            raise ConfigError("CONFIG_RESET_HEAD=y has no effect", why=why, todo="set it to n")
        return
    if fault:
        todo = "CONFIG_RESET_HEAD=y starts with a new head"
        raise ConfigError(f"the head in {folder} does not fit the data", why=fault, todo=todo)
    theirs, own = getattr(model, "head_classes", ()), dataset.class_names
    if sorted(theirs) == sorted(own) and tuple(theirs) != tuple(own):
        why = f"its classes are {', '.join(theirs)}, those of the data {', '.join(own)}"
        todo = "give numbers as labels, in its order, or set CONFIG_RESET_HEAD=y to start with a new head"
        raise ConfigError(f"the head in {folder} has the classes in another order", why=why, todo=todo)


def reset_head(model: nn.Module, config: Config) -> str:
    """Give the head of a model from its own directory new weights, by the seed; return what is new."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        name: str = model.reset_head()  # type: ignore[operator]
    return f"; new head, not read: {name}"


def load_weights(
    model: nn.Module, found: WeightFiles, config: Config, *, log: Callable[[str], object]
) -> None:
    """Load the weights in `found` into `model`. Raises ConfigError where they do not fit."""
    text = _load(model, found, config)
    log(f"Weights: {found}, SHA-256 {found.digest(cache=plugin_folders.ROOT / 'data')[:16]}: {text}")


def _has_layout(name: str) -> bool:
    return (plugin_folders.ROOT / "models" / name / "huggingface.py").is_file()


def _load(
    model: nn.Module,
    found: WeightFiles,
    config: Config,
    *,
    untrained: tuple[Mapping[str, Tensor], Config] | None = None,
) -> str:
    """Load weights into `model`, or compare alone on the meta device; return what matches.

    untrained: weights on the meta device, in the place of those in `found`, and what they will be trained by.
    """
    given = stored.read_weights(found) if untrained is None else untrained[0]
    fault, values = f"{OPTION}={found.path}", given.items() if untrained is None else ()
    bad = [name for name, each in values if each.is_floating_point() and not each.isfinite().all()]
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
        adapters.check_layers(model, given, found)
        if (below := adapters.base_of(found, config)) is not None:
            base = f"base {below}: {_load(model, below, config)}; adapters: "
        base += adapters.check_fit(model, found, config)
        only = lora.trained_names(model, given)
    names = given.keys() & model.state_dict().keys()
    if _has_layout(config.model) and not names and only is None and untrained is None:
        return _load_layout(model, given, found, config)
    head = stored.head_of(model, getattr(load_model(config.model), "HEAD", None))
    new = head if config.weights.reset_head else ""
    matched = stored.match(model, given, head=new, allow=config.weights.initial_weights_allow, only=only)
    if config.weights.reset_head and not matched.new:
        todo = f"set it to n, or name the head in models/{config.model}/model.py: HEAD = ..."
        raise ConfigError("CONFIG_RESET_HEAD=y: the model has no head of its own", todo=todo)
    if matched.faults:
        raise _misfit(matched, found, config, head=head, base=untrained and untrained[1])
    stored.load(model, matched.weights)
    return f"{base}{matched}"


def _misfit(
    matched: stored.Match, found: WeightFiles, config: Config, *, head: str, base: Config | None
) -> ConfigError:
    """Return the error for `found` weights with faults. base: what a run to come will be trained by."""
    what, lines = f"{OPTION}={found.path} does not fit the model", list(matched.faults.values())
    todo = "use weights of this model, or name what may differ in CONFIG_INITIAL_WEIGHTS_ALLOW"
    if head and all(name.startswith(f"{head}.") for name in matched.faults):
        todo = "CONFIG_RESET_HEAD=y starts with a new head"
    else:
        name, options = _trained(found, config, base)
        if name != config.model:  # names and shapes of its weights would explain no more
            return ConfigError(what, why=f"the run trained {name}, not {config.model}", todo=todo)
        if other := _other_options(options, config) or _of_another_package(found, config):
            todo = f"{other}; {todo}"
    why = f"{lines[0]}{f', and {len(lines) - 1} more' if lines[1:] else ''}; {matched}"
    findings = foremost(lines, "differences") if lines[1:] else []
    return ConfigError(what, why=why, todo=todo, findings=findings)


def _of_another_package(found: WeightFiles, config: Config) -> str:
    """Return which model takes the weights `found` by their names, if a config.json beside them tells."""
    if not found.files:
        return ""
    folder = found.path if found.path.is_dir() else found.path.parent
    try:
        with os_errors("read"):
            values = json.loads((folder / "config.json").read_bytes())
    except (ToolkitError, ValueError):
        return ""  # it is there for directories of models alone
    match values:
        case {"model_type": str(kind)}:
            instead = "CONFIG_MODEL_HUGGINGFACE=y " * ("dir" not in config.model_options)
            own = setting("CONFIG_HUGGINGFACE_DIR", folder)
            return f"set {instead}{own} without it, for the names of {kind} there"
        case {"architecture": str(kind)} if config.model_options.get("name") != kind:
            return f"set CONFIG_MODEL_TIMM=y CONFIG_TIMM_NAME={kind}, which has these names"
    return ""


def _trained(found: WeightFiles, config: Config, base: Config | None) -> tuple[str, Mapping[str, Any]]:
    """Return the model that was trained to the weights `found` and its options; none where no run tells.

    base: what a run to come will be trained by.
    """
    if base is not None:
        return base.model, base.model_options
    if found.checkpoint is None:
        return config.model, {}
    from lib.runs.index import objects_of  # a run without initial weights does not import it

    values = objects_of(RunDir(found.checkpoint[0].parent), "values")[0]["values"]
    name = values.get("MODEL", config.model)
    return name, MODELS.own(name, values_from_json(values)) if name == config.model else {}


def _other_options(options: Mapping[str, Any], config: Config) -> str:
    """Return which of a run's `options` of the model have other values in `config`, "" if none."""
    differ = {field: value for field, value in options.items() if value != config.model_options[field]}
    settings = [
        f"{symbol} is {json.dumps(differ[field])} there and {json.dumps(config.model_options[field])} here"
        for symbol, field in plugin_folders.symbols_of(MODELS.home(config.model)).items()
        if field in differ
    ]
    return f"configure the model of the run: {', '.join(settings)}" if settings else ""


def _load_layout(model: nn.Module, given: Mapping[str, Tensor], found: WeightFiles, config: Config) -> str:
    """Load weights in the layout of Hugging Face transformers, where the model has one."""
    fault = f"{OPTION}={found.path}"
    if config.weights.reset_head or config.weights.initial_weights_allow:
        what = f"CONFIG_RESET_HEAD and CONFIG_INITIAL_WEIGHTS_ALLOW have no effect on {fault}"
        why = "all weights in the layout of Hugging Face transformers are read, and none has a head"
        raise ConfigError(what, why=why, todo="leave them out")
    try:
        with ModelCode(config.model):
            load_layout(config.model).from_huggingface(model, given)
    except ConfigError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        todo, findings = error.todo or _of_another_package(found, config), error.findings
        raise ConfigError(f"{fault} cannot be used", why=why, todo=todo, findings=findings) from error
    return f"{len(given)} tensors in the layout of Hugging Face transformers"
