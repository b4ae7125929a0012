"""Configurations of the real Kconfig tree that differ in one option, whatever else would follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kconfiglib

from lib.config import config_from_values
from lib.kconf import Resolved
from lib.kconf.resolve import typed_value
from lib.kconf.tree import active_range, has_prompt, load_own_tree
from lib.kconf.values import rule_of
from lib.kconf.write import full_text
from tests.contract.cases import WITH_EXTRAS

ROOT = Path(__file__).resolve().parents[2]

Pins = Mapping[str, str]  # symbol -> raw value; a choice by its member: y

# For options that are neither y or n nor a number: what to try. A new option of text or path goes here.
TEXTS = {
    "DATA_DIR": ("elsewhere",),
    "FROZEN_MODEL_A": ("toolkit:pairs",),
    "FROZEN_MODEL_B": ("toolkit:bytes",),
    "DIST_NNODES": ("2",),
    "DIST_ENDPOINT": ("there:29500",),
    "SLURM_TIME": ("2:00:00",),
    "SLURM_PARTITION": ("long",),
    "INITIAL_WEIGHTS": ("missing.safetensors",),
    "INITIAL_WEIGHTS_ALLOW": ("conv1",),
    "WEIGHTS_DIR": ("weights",),
    "FREEZE": ("missing", "conv1 linear1"),
    "LORA_TARGETS": ("linear1", "missing"),
    "LORA_TRAIN": ("conv1", "missing"),
    "CHECKPOINT_URL": ("file://{}",),
    "SINK_PROJECT": ("another",),
    "LR_STEP_PCT_LIST": ("34", "10,90"),
    "METRICS": ("macro_f1", "roc_auc"),
    "BEST_METRIC": ("accuracy",),
    "CLASS_WEIGHTS": ("balanced", "1,2,3,4,5,6,7,8,9,10"),
    "IMAGE_FOLDER_GROUP": ("[0-9]",),
    "JSONL_FILE": ("other.jsonl",),
    "JSONL_VALIDATION_FILE": ("train.jsonl",),
    "CHAT_FILE": ("other-chat.jsonl",),
    "CHAT_VALIDATION_FILE": ("chat.jsonl",),
    "TABULAR_FILE": ("other.csv",),
    "TABULAR_VALIDATION_FILE": ("table.csv",),
    "TABULAR_GROUP": ("colour",),
    "TABULAR_TARGETS": ("size",),
    "TABULAR_INPUTS": ("size",),
    "TABULAR_CATEGORIES": ("size",),
}


@cache
def tree() -> Any:
    return load_own_tree(ROOT)


def prompted() -> list[Any]:
    return [symbol for symbol in tree().unique_defined_syms if has_prompt(symbol)]


def can_be_set(symbol: Any) -> bool:
    """False where an option needs a capability that no model or data set of the tree has, or a package.

    The former are those of the core that a deleted plug-in would show; for the latter see tests/extras.
    """
    extra = any(Path(node.filename).parent.name in WITH_EXTRAS for node in symbol.nodes if node.prompt)
    extra = extra or symbol.name in ("TOKENIZER_HUGGINGFACE", "TOKENIZER_DIR")  # tests/extras/test_chat.py
    return _may_hold(symbol) and not extra


def _may_hold(condition: Any) -> bool:
    """False where nothing can make `condition` true; what is negated or compared always may be."""
    if isinstance(condition, tuple):
        if condition[0] is kconfiglib.AND:
            return all(map(_may_hold, condition[1:]))
        return condition[0] is not kconfiglib.OR or any(map(_may_hold, condition[1:]))
    if isinstance(condition, kconfiglib.Symbol) and condition.is_constant:
        return bool(condition.tri_value)
    if has_prompt(condition):
        return any(node.prompt and _may_hold(node.prompt[1]) for node in condition.nodes)
    return _may_hold(condition.rev_dep) or any(_may_hold(when) for _, when in condition.orig_defaults)


def settle(assignments: Mapping[str, str]) -> Pins:
    """`assignments` as far as they can be set, and the values that everything else that can be set has then.

    Nothing that is pinned follows another option any more.
    """
    _set(assignments)
    return {
        symbol.name: symbol.str_value
        for symbol in prompted()
        if symbol.visibility and (symbol.choice is None or symbol.tri_value)
    }


def shown(pins: Pins) -> list[str]:
    """What can be set beside `pins`: of a choice the members that are not chosen."""
    _set(pins)
    return [one.name for one in prompted() if one.visibility and (one.choice is None or not one.tri_value)]


def resolved(pins: Pins) -> Resolved:
    """Raises ConfigError for what Kconfig cannot refuse."""
    _set(pins)
    values = {one.name: typed_value(one) for one in tree().unique_defined_syms if one.choice is None}
    config_from_values(values)
    return Resolved(
        values=values, in_effect={}, origins={}, given=dict(pins), text=full_text(tree()), minimal=""
    )


def changed(pins: Pins, name: str) -> Iterator[Pins]:
    """`pins` with other values of `name`: y of a choice's member, several of a number."""
    symbol = tree().syms[name]
    if symbol.choice is not None:
        if pins.get(name) == "y":
            return
        members = {member.name for member in symbol.choice.syms}
        yield {**{other: value for other, value in pins.items() if other not in members}, name: "y"}
        return
    _set(pins)
    for value in list(_others(symbol, pins[name])):
        trial = {**pins, name: value}
        _set(trial)
        if symbol.str_value == value and _parses(symbol):
            yield trial


def _others(symbol: Any, value: str) -> Iterator[str]:
    if symbol.orig_type == kconfiglib.BOOL:
        yield "n" if value == "y" else "y"
    elif symbol.orig_type == kconfiglib.INT:
        limits = active_range(symbol)
        assert limits is not None, symbol.name
        number = int(value)
        tried = dict.fromkeys((2 * number, number + 1, number // 2, number + 3, 50, limits[0]))
        yield from (str(one) for one in tried if one != number and limits[0] <= one <= limits[1])
    elif symbol.name in TEXTS:
        yield from TEXTS[symbol.name]
    else:
        number = float(value)
        tried = dict.fromkeys((number / 2, 2 * number, 0.001, 0.5, 0.9))
        yield from (str(one) for one in tried if one != number)


def _parses(symbol: Any) -> bool:
    rule = rule_of(symbol)
    try:
        return rule is None or rule.parse(symbol.str_value) is not None
    except ValueError:
        return False


def _set(assignments: Mapping[str, str]) -> None:
    tree().unset_values()
    for name, value in assignments.items():
        assert tree().syms[name].set_value(value), f"{name}={value}"
