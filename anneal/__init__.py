"""Configure, plan and train runs from Python, and use what they have learned: docs/tutorials/python.md.

The functions are those of train/api.py and lib/memory, imported when they are used (docs/adr/0008-python.md).
"""

from typing import TYPE_CHECKING, Any

from anneal._tree import module

if TYPE_CHECKING:
    from lib.errors import ConfigError, ToolkitError
    from lib.memory import Report, estimate, fits, largest_batch
    from train.api import Configuration, Model, Plan, Run, configure, export, fit, load, plan, predict

__all__ = [
    "ConfigError",
    "Configuration",
    "Model",
    "Plan",
    "Report",
    "Run",
    "ToolkitError",
    "configure",
    "estimate",
    "export",
    "fit",
    "fits",
    "largest_batch",
    "load",
    "plan",
    "predict",
]
_HOMES = dict.fromkeys(("ConfigError", "ToolkitError"), "lib.errors")
_HOMES |= dict.fromkeys(("Report", "estimate", "fits", "largest_batch"), "lib.memory")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module(_HOMES.get(name, "train.api")), name)


def __dir__() -> list[str]:
    return __all__
