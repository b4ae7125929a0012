"""Packages of models that are optional extras."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from lib.errors import ConfigError


def import_extra(name: str) -> Any:
    """Return the package `name`, which is an extra of the same name. Raises ConfigError where it is missing.

    timm imports torchvision for transforms and file formats, which its models do not use. Where torchvision
    cannot be imported a stand-in takes its place for the duration of the import.
    """
    try:
        with _stand_in() if name == "timm" and name not in sys.modules else contextlib.nullcontext():
            return importlib.import_module(name)
    except ImportError as error:
        todo = f"install it beside torch: .venv/bin/pip install {name}"
        raise ConfigError(f"the package {name} is needed here", why=str(error), todo=todo) from error


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    try:
        importlib.import_module("torchvision")  # one for another torch is found and cannot be imported
    except (ImportError, RuntimeError, AttributeError):
        pass
    else:
        yield
        return
    finder = _Torchvision()
    for module in _modules():
        del sys.modules[module]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        # transformers would take it for torchvision.
        sys.meta_path.remove(finder)
        for module in _modules():
            del sys.modules[module]


def _modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "torchvision"]


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision with a class of every name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002
        if fullname.partition(".")[0] == "torchvision":
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
    """A class that has every attribute and cannot be used."""

    def __getattr__(cls, name: str) -> Any:
        return _missing(name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise ImportError(f"{cls.__name__} of torchvision is needed, which cannot be imported")


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type.__call__(_Anything, name, (), {})
