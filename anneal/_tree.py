"""The source tree under private names, so that a user's own packages may be called lib, models or train.

Its packages are loaded below this module, where what they import by their own names is found first. Neither
sys.path nor the names at the top of sys.modules change (docs/adr/0008-python.md).
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lib", "models", "scripts", "train")
_KEPT = ROOT / ".external"  # of EXTERNAL=, as make has kept it
__path__ = [str(ROOT)]  # it is the parent package of those


def module(name: str) -> Any:
    """Import the module `name` of the tree, such as "lib.kconf"."""
    return importlib.import_module(f"{__name__}.{name}")


def _import(name: str, names: Any = None, _: Any = None, wanted: Any = (), level: int = 0) -> Any:
    """Import as __import__ does, but packages of the tree from below this module."""
    top = name.partition(".")[0]
    if level or top not in PACKAGES:
        return builtins.__import__(name, names, None, wanted or (), level)
    found = module(name)
    return builtins.__import__(found.__name__, names, None, wanted) if wanted else module(top)


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = _BUILTINS
        super().exec_module(module)


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, _: Any = None) -> Any:
        spec = super().find_spec(fullname, path) if fullname.startswith(f"{__name__}.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
if _name := os.environ.get("ANNEAL_EXTERNAL", _KEPT.read_text("utf-8").strip() if _KEPT.is_file() else ""):
    os.environ["ANNEAL_EXTERNAL"] = str(Path(_name).absolute())
