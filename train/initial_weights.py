"""The weights that training starts from: CONFIG_INITIAL_WEIGHTS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lib import plugins
from lib.config import Config
from lib.data.types import Spec
from lib.errors import ConfigError
from lib.nn import weights as stored
from lib.nn.model_code import ModelCode, build_model, load_layout, load_model
from lib.runs.weight_files import WeightFiles, find_weights

_SHOWN = 20  # differences that an error lists


def initial_weights(config: Config, root: Path) -> WeightFiles | None:
    """Return the files that training starts from, None for random weights. A relative path starts at `root`.

    Raises ConfigError where there is nothing that can be read.
    """
    own = config.weights
    if not own.initial_weights:
        return None
    return find_weights(own.initial_weights, root=root, folders=(own.weights_dir, config.data_dir))


def check_weights(config: Config, spec: Spec, root: Path, *, log: Callable[[str], object]) -> None:
    """Check that the weights fit the model, and log what matches. Raises ConfigError where they do not."""
    found = initial_weights(config, root)
    if found is None:
        return
    given = stored.read_weights(found)
    # Only the layout of another program needs a model with numbers.
    with torch.device("cpu" if _has_layout(config.model) else "meta"):
        model = build_model(config.model, config.model_options, spec, seed=config.seed)
    log(f"Initial weights: {found}: {_load(model, given, found, config)}")


def load_weights(
    model: nn.Module, found: WeightFiles, config: Config, *, log: Callable[[str], object]
) -> None:
    """Load the weights in `found` into `model`. Raises ConfigError where they do not fit."""
    text = _load(model, stored.read_weights(found), found, config)
    log(f"Weights: {found}, SHA-256 {found.digest(cache=plugins.ROOT / 'data')[:16]}: {text}")


def _has_layout(name: str) -> bool:
    return (plugins.ROOT / "models" / name / "huggingface.py").is_file()


def _load(model: nn.Module, given: Mapping[str, Tensor], found: WeightFiles, config: Config) -> str:
    """Load `given` into `model`, or compare alone on the meta device; return what matches."""
    fault, own = f"CONFIG_INITIAL_WEIGHTS={found.path}", config.weights
    bad = [name for name, each in given.items() if each.is_floating_point() and not each.isfinite().all()]
    if bad:
        why = f"{bad[0]} has values that are not finite{f', and {len(bad) - 1} more' if bad[1:] else ''}"
        raise ConfigError(f"{fault} cannot be used", why=why, todo="name an earlier checkpoint")
    if _has_layout(config.model) and not given.keys() & model.state_dict().keys():
        return _load_layout(model, given, fault, config)
    head = stored.head_of(model, getattr(load_model(config.model), "HEAD", None))
    new = head if own.reset_head else ""
    matched = stored.match(model, given, head=new, allow=own.initial_weights_allow)
    if own.reset_head and not matched.head:
        todo = f"set it to n, or name the head in models/{config.model}/model.py: HEAD = ..."
        raise ConfigError("CONFIG_RESET_HEAD=y: the model has no head of its own", todo=todo)
    if faults := matched.faults():
        raise _does_not_fit(fault, list(faults.values()), matched, all(_is_in(head, name) for name in faults))
    stored.load(model, matched.weights)
    return matched.report()


def _is_in(head: str, name: str) -> bool:
    return bool(head) and name.startswith(f"{head}.")


def _does_not_fit(fault: str, lines: list[str], matched: stored.Match, is_head: bool) -> ConfigError:
    """Return the error of weights that differ by `lines`; is_head: in the head alone."""
    todo = "use weights of this model, or name what may differ in CONFIG_INITIAL_WEIGHTS_ALLOW"
    if is_head:
        todo = "CONFIG_RESET_HEAD=y starts with a new head"
    others = f", and {len(lines) - 1} more" if lines[1:] else ""
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    why = f"{lines[0]}{others}; {len(matched.weights)} weights match"
    findings = [*lines[:_SHOWN], *more] if lines[1:] else []
    return ConfigError(f"{fault} does not fit the model", why=why, todo=todo, findings=findings)


def _load_layout(model: nn.Module, given: Mapping[str, Tensor], fault: str, config: Config) -> str:
    """Load weights in the layout of Hugging Face transformers, where the model has one."""
    own = config.weights
    if own.reset_head or own.initial_weights_allow:
        name = "RESET_HEAD" if own.reset_head else "INITIAL_WEIGHTS_ALLOW"
        why = "the layout of Hugging Face transformers has no such weights: all of it is read"
        raise ConfigError(f"CONFIG_{name} has no effect on {fault}", why=why, todo="leave it out")
    try:
        with ModelCode(config.model):
            load_layout(config.model).from_huggingface(model, given)
    except ConfigError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        raise ConfigError(
            f"{fault} cannot be used", why=why, todo=error.todo, findings=error.findings
        ) from error
    return f"{len(given)} tensors in the layout of Hugging Face transformers"
