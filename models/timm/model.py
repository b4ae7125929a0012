"""Image classifiers of the package timm, with random weights."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lib.data.types import ImageSpec
from lib.errors import ConfigError, meant
from lib.memory.simulation import simulated
from lib.memory.twin import RealConstants
from lib.nn.dropout import Dropout
from lib.nn.packages import import_extra

TASK = "classify"
EXTRA = "timm"  # the package that it needs

_LOADS = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "checkpoint_path"}
_LOADS |= {"cache_dir", "weights"}
_WEIGHTS = "name a local file of weights in CONFIG_INITIAL_WEIGHTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of models/timm/Kconfig."""

    name: str
    options: str


def build(options: Options, spec: ImageSpec) -> nn.Module:
    """Build a model of timm from (N, C, H, W) images to (N, classes) logits.

    Raises ConfigError without timm, for an unknown name, and for options that the model's class does not have
    or that are of another type.
    """
    timm = import_extra(EXTRA)
    _check_name(timm, options.name)
    with RealConstants() if simulated() else contextlib.nullcontext():
        with torch.device("meta"):  # entry points take any argument; the class that they make names them
            known = _arguments(type(timm.create_model(options.name)))
        given = {**_of_data(known, spec), **_parsed(options, known)}
        model: nn.Module = timm.create_model(options.name, **given)
    _key_head_dropout(model)
    return model


def _check_name(timm: Any, name: str) -> None:
    requested = f'CONFIG_TIMM_NAME="{name}"'
    if ":" in name or "/" in name:
        why = "a name with a colon or a slash loads files, or downloads them"
        todo = f"give a name of timm.list_models(), and {_WEIGHTS}"
        raise ConfigError(f"{requested} is refused", why=why, todo=todo)
    plain, _, tag = name.partition(".")
    if tag and timm.is_model(plain):
        why, todo = f"{tag} names weights, and those are not loaded here", f'set CONFIG_TIMM_NAME="{plain}"'
        raise ConfigError(f"{requested} has a tag", why=why, todo=f"{todo}, and {_WEIGHTS}")
    if not timm.is_model(name):
        listed = "timm.list_models() has them all"
        raise ConfigError(
            f"{requested} is no model of timm {timm.__version__}",
            todo=meant(name, timm.list_models(), listed=listed),
        )


def _arguments(kind: type) -> dict[str, Any]:
    """Return the arguments of a model's class with their defaults, those that it hands on included."""
    known: dict[str, Any] = {}
    for base in kind.__mro__:
        init = vars(base).get("__init__")
        if base is nn.Module or init is None:
            break
        parameters = inspect.signature(init).parameters.values()
        known = {each.name: each.default for each in parameters if each.kind != each.VAR_KEYWORD} | known
        if not any(each.kind == each.VAR_KEYWORD for each in parameters):
            break
    return {name: default for name, default in known.items() if name != "self"}


def _of_data(known: Mapping[str, Any], spec: ImageSpec) -> dict[str, Any]:
    size = spec.height if spec.height == spec.width else (spec.height, spec.width)
    given = {"num_classes": spec.classes, "in_chans": spec.channels, "img_size": size}
    return {name: value for name, value in given.items() if name in known}


def _parsed(options: Options, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of CONFIG_TIMM_OPTIONS by name."""
    found: dict[str, Any] = {}
    for word in options.options.split():
        name, equals, text = word.partition("=")
        what = f'CONFIG_TIMM_OPTIONS="{options.options}": {word}'
        if not (equals and name and text):
            raise ConfigError(f"{what} is not name=value", todo='write "depth=4 drop_path_rate=0.1"')
        if name in found:
            raise ConfigError(f"{what} sets {name} a second time", todo="keep one of them")
        if name in ("num_classes", "in_chans", "img_size"):
            raise ConfigError(f"{what} is decided by the data set", todo=f"leave {name} out")
        if name in _LOADS:
            why = "it loads files, or downloads them"
            raise ConfigError(f"{what} is refused", why=why, todo=f"leave it out, and {_WEIGHTS}")
        if name not in known:
            listed = f"{options.name} has {', '.join(sorted(known))}"
            raise ConfigError(f"{what} is no option of the model", todo=meant(name, known, listed=listed))
        found[name] = _value(text)
        if not _fits(found[name], known[name]):
            default = f"its default is {known[name]!r}"
            raise ConfigError(f"{what} has the wrong type", why=default, todo="write one of that type")
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _fits(value: Any, default: Any) -> bool:
    """Return True if `value` is of the type of `default`; in the place of None anything plain is."""
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int | float):  # many take a number for each stage, too
        return type(value) in (int, tuple, list) or (type(value) is float and isinstance(default, float))
    if isinstance(default, str):
        return isinstance(value, str)
    return isinstance(value, list | tuple) if isinstance(default, list | tuple) else not callable(default)


def _key_head_dropout(model: nn.Module) -> None:
    """Put a keyed layer in the place of F.dropout in front of the classifier, as in EfficientNet."""
    rate, head = getattr(model, "drop_rate", 0), getattr(type(model), "forward_head", None)
    if not rate or head is None or "dropout(" not in inspect.getsource(head):
        return
    vars(model)["drop_rate"] = 0.0
    model.add_module("keyed_head_drop", layer := Dropout(rate, site=0))
    classifier = model.get_classifier()  # type: ignore[operator]

    def drop(_: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        return layer(given[0])  # type: ignore[no-any-return]

    classifier.register_forward_pre_hook(drop)
