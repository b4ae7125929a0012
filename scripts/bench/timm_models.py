"""timm without torchvision, which it imports and its models do not use."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision with a class of every name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002
        if fullname.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__, module.__version__ = [], "0"  # type: ignore[attr-defined]
        module.__getattr__ = _missing  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        return _missing(name)


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


def import_timm() -> Any:
    """Return the package timm; torchvision is replaced by a stand-in for the rest of the process."""
    if not any(isinstance(each, _Torchvision) for each in sys.meta_path):
        sys.meta_path.insert(0, _Torchvision())
    return importlib.import_module("timm")
