"""Adapters of a configured model: adding them, what they belong to, and files as PEFT writes them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib import plugin_folders
from lib.config import Config
from lib.data.types import Spec
from lib.errors import ConfigError
from lib.kconf import values_from_json
from lib.nn import lora
from lib.nn.model_code import load_model
from lib.nn.model_directory import path_of, stored_dtypes
from lib.nn.weights import head_of, is_adapter, read_metadata, read_weights
from lib.plan.types import Precision
from lib.runs import checkpoint
from lib.runs.directory import RunDir
from lib.runs.weight_files import OPTION, WeightFiles, find_weights

FILE, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_PEFT = re.compile(rf"{re.escape(_PREFIX)}(.+?)((?<=lora_[AB])\.weight)?")
_OF_DATA = ("classes", "tags", "targets")  # fields of a spec, whose number is that of the head's outputs
# Other values would make another function of the same weights.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "bias": "none",
    "rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False,
}  # fmt: skip
# Settings that do not, or are checked by themselves. Any other, known or not, has to be off.
_ANY_VALUE = {
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version",
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "loftq_config", "eva_config",
    "megatron_core", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_STARTS = ("gaussian", "eva", "orthogonal")  # other named ones change the weights below the adapters


def add(model: nn.Module, config: Config, spec: Spec) -> None:
    """Add the configured adapters to a new `model`. The head is trained, too, where the data size it."""
    rank, alpha = config.weights.lora_rank, config.weights.lora_alpha
    assert rank and alpha
    lora.adapt(
        model,
        rank=rank,
        alpha=alpha,
        dropout=config.weights.lora_dropout or 0.0,
        targets=config.weights.lora_targets or "",
        train=config.weights.lora_train or "",
        head=head_of(model, getattr(load_model(config.model), "HEAD", None)),
        trains_head=config.weights.reset_head or any(hasattr(spec, name) for name in _OF_DATA),
        four_bit=config.weights.adapt == "qlora",
        seed=config.seed,
    )


def settle(model: nn.Module, config: Config, device: torch.device, *, contents: bool) -> dict[str, Any]:
    """Store frozen layers in 4 bits on `device` if that is configured; return what the adapters belong to.

    contents: with a hash of the frozen weights, which are in `model` now.
    """
    facts = base_facts(model, config, contents=contents)
    if config.weights.adapt == "qlora":
        from lib.nn.four_bit import pack

        pack(model, device)
    return facts


def halve(model: nn.Module, config: Config, precision: Precision) -> bool:
    """Store frozen linear layers in the type of their directory's files; return True if that was done.

    Only where products are in the same half precision, so that none changes.
    """
    folder = _directory(config)
    if config.weights.adapt == "full" or not folder or config.weights.initial_weights or precision == "fp32":
        return False  # initial weights may be others than those of the directory
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    if stored_dtypes(folder) != {dtype}:
        return False
    lora.halve(model, dtype)
    return True


def _directory(config: Config) -> Path | None:
    """Return the directory of a model of transformers; None for other models."""
    named = config.model_options.get("dir")
    return path_of(str(named)) if named else None


def without_files(config: Config) -> str:
    """Return what a plan assumes of a model's directory without weights; "" where nothing is assumed."""
    folder = _directory(config)
    if folder is None or config.weights.initial_weights or any(folder.glob("*.safetensors")):
        return ""
    if config.weights.adapt == "full":
        return f"Weights: random ones, for {folder} has none"
    (dtype,) = stored_dtypes(folder)
    return f"Weights: {folder} has none; planned as if it had, in {str(dtype).removeprefix('torch.')}"


def check_files(config: Config) -> None:
    """Raise ConfigError for adapters of random weights, where a directory was to have others."""
    if config.weights.adapt != "full" and without_files(config):
        what = f"CONFIG_ADAPT_{config.weights.adapt.upper()}=y has nothing to adapt"
        todo = "copy its *.safetensors there (make fetch REPO=owner/name DIRECTORY=... does), or set "
        why = f"{_directory(config)} has no weights"
        raise ConfigError(what, why=why, todo=f"{todo}CONFIG_ADAPT_FULL=y to train random ones")


def base_facts(model: nn.Module, config: Config, *, contents: bool) -> dict[str, Any]:
    """Return `lora.base_facts` of the configured adapters."""
    rank, alpha = config.weights.lora_rank, config.weights.lora_alpha
    assert rank and alpha
    return lora.base_facts(model, rank=rank, alpha=alpha, contents=contents)


def format_trained(model: nn.Module, config: Config) -> str:
    """Format what is trained, and how many parameters."""
    layers, weights = lora.adapted(model), dict(model.named_parameters())
    trained = {name: each.numel() for name, each in weights.items() if each.requires_grad}
    whole = [name for name in trained if not is_adapter(name)]
    bits = ", of frozen weights in 4 bits" if config.weights.adapt == "qlora" else ""
    count = f"{sum(trained.values()):,} of {sum(each.numel() for each in weights.values()):,} parameters"
    beside = f", with all of {', '.join(whole)}" if whole else ""
    return f"Adapters: {len(layers)} layers, rank {config.weights.lora_rank}{bits}; trained: {count}{beside}"


# Stored adapters


def own_names(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `given` by our names: those of PEFT's files lose what PEFT adds."""
    matches = {name: _PEFT.fullmatch(name) for name in given}
    return {found[1] if (found := matches[name]) else name: each for name, each in given.items()}


def base_of(found: WeightFiles, config: Config) -> WeightFiles | None:
    """Return the weights that the adapters `found` were trained on; None where the model has them.

    Raises ConfigError where those are not there any more.
    """
    if config.model_options.get("dir"):
        return None
    if found.checkpoint is not None:
        run = RunDir(found.checkpoint[0].parent)
        named = values_from_json(run.read_json("values")).get("INITIAL_WEIGHTS")
    else:
        named = _settings(found).get("base_model_name_or_path")
    folders = (config.weights.weights_dir, config.data_dir or "")
    return find_weights(str(named), root=plugin_folders.ROOT, folders=folders) if named else None


def base_dtype(config: Config, found: WeightFiles | None = None) -> torch.dtype:
    """Return the widest stored type of the weights that a run, or adapters `found`, started from."""
    directory = config.model_options.get("dir")
    if found is None:
        named, root = directory or config.weights.initial_weights, plugin_folders.ROOT
        folder = _directory(config)
        if not named or (folder and not any(folder.glob("*.safetensors"))):  # it started from random ones
            return torch.float32
        found = find_weights(
            str(named), root=root, folders=(config.weights.weights_dir, config.data_dir or "")
        )
    given = read_weights(found)
    if any(map(is_adapter, own_names(given))):
        below = base_of(found, config)
        return torch.float32 if below is None else base_dtype(config, below)
    types = [each.dtype for each in given.values() if each.is_floating_point()]
    return functools.reduce(torch.promote_types, types)


def check_layers(model: nn.Module, given: Mapping[str, Tensor], found: WeightFiles) -> None:
    """Raise ConfigError where the adapters `given` are for other layers than those of `model`.

    given: by our names, of `found`. That tells another model in a line; each layer alone would have two.
    """
    own, fault = lora.adapted(model), f"{OPTION}={found.path} does not fit"
    theirs = {name.rpartition(".")[0] for name in given if is_adapter(name)}
    todo = "use adapters of this model, or the model that they were trained on"
    of_own = _depths(own)
    for stack, depth in _depths(theirs).items():
        if depth != of_own.get(stack, depth):
            why = f"layers in {stack} with adapters: {depth}, of this configuration: {of_own[stack]}"
            raise ConfigError(f"{fault}: its adapters are for another model", why=why, todo=todo)
    other = list[str]()
    for name in sorted(theirs & own.keys()):
        layer, (a, b) = own[name], (given.get(f"{name}.lora_{each}") for each in "AB")
        if a is not None and b is not None and a.dim() == b.dim() == 2:
            stored, expected = (a.shape[1], b.shape[0]), (layer.in_features, layer.out_features)
            if stored != expected:
                other.append(
                    f"{name} is from {stored[0]} to {stored[1]}, here from {expected[0]} to {expected[1]}"
                )
    if other:
        why = f"{other[0]}{f', and {len(other) - 1} more' if other[1:] else ''}"
        raise ConfigError(f"{fault}: its adapters are for layers of other sizes", why=why, todo=todo)


def _depths(names: Collection[str]) -> dict[str, int]:
    """Return how many numbers the layers of each stack have, by what is before their first number."""
    found: dict[str, set[str]] = {}
    for name in names:
        if matched := re.match(r"(.*?)\.([0-9]+)(?:\.|$)", name):
            found.setdefault(matched[1], set()).add(matched[2])
    return {stack: len(numbers) for stack, numbers in found.items()}


def check_fit(model: nn.Module, found: WeightFiles, config: Config) -> str:
    """Return a note on the base of the adapters `found`. Raises ConfigError where they are for another."""
    fault = f"{OPTION}={found.path} does not fit"
    if found.checkpoint is not None:
        loaded = checkpoint.load(found.checkpoint[0], which=found.checkpoint[1], log=lambda _: None)
        known = loaded[1]["adapters"] if loaded else {}
    else:
        settings = _settings(found)
        if what := _other_function(settings):
            todo = "merge them with PEFT, and start from the merged weights"
            raise ConfigError(f"{fault}: its {what}", todo=todo)
        known = json.loads(read_metadata(found.files[0]).get("anneal", "{}"))
        known |= {"rank": settings["r"], "alpha": settings["lora_alpha"]}
    own = base_facts(model, config, contents=not next(model.parameters()).is_meta)
    for name in ("rank", "alpha"):
        if known[name] != own[name]:
            symbol = f"CONFIG_LORA_{name.upper()}"
            what = f"{fault}: its adapters have {name} {known[name]}, and {symbol}={own[name]}"
            raise ConfigError(what, todo=f"set {symbol}={known[name]}")
    if known.get("shapes", own["shapes"]) != own["shapes"]:
        why, todo = "its frozen weights had other names or shapes", "give them their base"
        raise ConfigError(f"{fault}: its adapters are for another model", why=why, todo=todo)
    if "shapes" not in known:
        return "their base is not recorded, and names and shapes fit; "
    if "weights" in known and known["weights"] != own.get("weights", known["weights"]):
        return "warning: they were trained on other values of the frozen weights; "
    return ""


def _other_function(settings: Mapping[str, Any]) -> str:
    """Return the first setting with which the adapters are another function than ours; "" for none."""
    for name, value in settings.items():
        plain = _PLAIN.get(name)
        if name not in _ANY_VALUE and value != plain and (value or plain):
            supported = "which is not" if plain is None else f"and {json.dumps(plain)} is"
            return f"{name} is {json.dumps(value)}, {supported} supported"
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start not in _STARTS:
        return f"init_lora_weights is {json.dumps(start)}, which changes the weights below the adapters"
    return ""


def _settings(found: WeightFiles) -> dict[str, Any]:
    """Return the content of adapter_config.json beside the weights. Raises ConfigError."""
    file = found.files[0].with_name(SETTINGS)
    try:
        settings: dict[str, Any] = json.loads(file.read_bytes())
        whole = {name: int(settings[name]) for name in ("r", "lora_alpha")}
        if other := [name for name in whole if whole[name] != settings[name]]:
            raise ValueError(f"{other[0]} is {settings[other[0]]}, and a whole number is supported")
        return settings | whole
    except (OSError, ValueError, KeyError, TypeError) as error:
        what, why = f"{OPTION}={found.path} has adapters", f"{file.name} beside them: {error}"
        raise ConfigError(what, why=why, todo="give the folder that PEFT or make export wrote") from error


def write(model: nn.Module, config: Config, facts: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Write the adapters of `model`, and what is trained whole, to `folder`; return them by PEFT's names.

    facts: what they belong to (`settle`). Raises ConfigError for what those files cannot hold.
    """
    from safetensors.torch import save_file

    trained = {n: w for n, w in model.named_parameters(remove_duplicate=False) if w.requires_grad}
    owners = sorted({name.rpartition(".")[0] for name in trained if not is_adapter(name)})
    if "" in owners:
        name = next(name for name in trained if "." not in name)
        what = f"FORMAT=adapter cannot hold {name}, which is in no module"
        raise ConfigError(what, why="PEFT stores whole modules", todo="write the merged weights: MERGE=y")
    tensors: dict[str, Tensor] = {
        f"{_PREFIX}{name}.weight": each for name, each in trained.items() if is_adapter(name)
    }
    for owner in owners:
        held = model.get_submodule(owner).state_dict()
        tensors |= {f"{_PREFIX}{owner}.{name}": each for name, each in held.items()}
    tensors = {name: each.detach().cpu().clone() for name, each in tensors.items()}
    save_file(tensors, folder / FILE, metadata={"format": "pt", "anneal": json.dumps(dict(facts))})
    settings = _PLAIN | {
        "base_model_name_or_path": config.model_options.get("dir") or config.weights.initial_weights or None,
        "r": config.weights.lora_rank,
        "lora_alpha": config.weights.lora_alpha,
        "lora_dropout": config.weights.lora_dropout,
        "target_modules": sorted(lora.adapted(model)),
        "modules_to_save": owners or None,
        "inference_mode": True,
        "init_lora_weights": True,
        "task_type": None,
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")
    return tensors
