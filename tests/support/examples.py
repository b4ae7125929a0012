"""What core tests need of a model, task or data set of its own kind: `example.py` beside the model's tests.

Each may define any of what is asked for here by name, so that a core test names no such model.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@cache
def examples() -> dict[str, ModuleType]:
    """Model -> the module tests/models/MODEL/example.py, of those that have one."""
    files = sorted((ROOT / "tests" / "models").glob("*/example.py"))
    return {
        file.parent.name: importlib.import_module(f"tests.models.{file.parent.name}.example")
        for file in files
    }


def told_of(name: str) -> list[Any]:
    """What the examples that define `name` say, in the order of the models."""
    return [vars(module)[name] for module in examples().values() if name in vars(module)]


def merged(name: str) -> dict[str, Any]:
    """The union of the mappings `name`, which share no key."""
    found: dict[str, Any] = {}
    for mapping in told_of(name):
        assert not found.keys() & mapping.keys(), name
        found |= mapping
    return found
