"""Config objects and hardware for tests: the defaults of the real Kconfig tree, and recorded machines."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import kconfiglib

from lib.config import Config, config_from_values
from lib.kconf.values import Value
from lib.plan.types import Hardware, ModelFacts

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/fixtures/hardware"

# (parameters, bytes saved for backward by one sample of the usual small images in fp32, training
# samples). Bytes of the residual networks were measured with saved-tensor hooks at 3x32x32.
SMALL_IMAGE_FACTS = {
    "lenet5": (61_706, 60_000, 60_000),
    "resnet18": (11_173_962, 4_700_208, 50_000),
    "resnet50": (23_520_842, 25_514_032, 50_000),
}


def make_config(model: str = "lenet5", **changes: object) -> Config:
    """The defaults for `model`, with fields changed (without regard to their dependencies).

    The method is the table, for which no model has to be built, unless `changes` say otherwise.
    """
    return _defaults(model).replace(**{"auto_method": "table"} | changes)


def changed(config: Config, **changes: Any) -> Config:
    """`config` with fields changed, and options of the task by their names in it."""
    own = {name: changes.pop(name) for name in config.task_options if name in changes}
    return config.replace(task_options={**config.task_options, **own}, **changes)


def make_facts(model: str = "lenet5", **changes: Any) -> ModelFacts:
    parameters, bytes_per_sample, train_size = SMALL_IMAGE_FACTS[model]
    facts = ModelFacts(
        name=model,
        parameters=parameters,
        bytes_per_sample=bytes_per_sample,
        train_size=train_size,
        has_batchnorm=model.startswith("resnet"),
    )
    return dataclasses.replace(facts, **changes)


def hardware_names() -> list[str]:
    return sorted(path.stem for path in FIXTURES.glob("*.json"))


def load_hardware(name: str) -> Hardware:
    return Hardware.from_json(json.loads((FIXTURES / f"{name}.json").read_text()))


@cache
def _defaults(model: str) -> Config:
    kconf = kconfiglib.Kconfig(str(ROOT / "Kconfig"), warn=False)
    assert kconf.syms[f"MODEL_{model.upper()}"].set_value("y")
    return config_from_values(
        {symbol.name: _value(symbol) for symbol in kconf.unique_defined_syms if symbol.choice is None}
    )


def _value(symbol: kconfiglib.Symbol) -> Value:
    text = symbol.str_value
    if symbol.type == kconfiglib.BOOL:
        return bool(text == "y")
    if text == "":
        return "" if symbol.visibility else None
    if symbol.type == kconfiglib.INT:
        return int(text)
    helps = [node.help for node in symbol.nodes if node.help]
    kind = re.match(r"Value: (float|int list|)", helps[0] if helps else "")
    if kind and kind[1] == "float":
        return float(text)
    if kind and kind[1] == "int list":
        return tuple(int(part) for part in text.split(","))
    return str(text)
