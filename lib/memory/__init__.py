"""Memory of a training step: predicted without a device, or measured on one.

The step is passed as a callable; data and the training loop are unknown here. Imported by lib, models and
train. The names below are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lib.memory.any_module import Report, estimate, fits, largest_batch
    from lib.memory.live import Trace
    from lib.memory.predict import predict_peak

__all__ = ["Report", "Trace", "estimate", "fits", "largest_batch", "predict_peak"]
_HOMES = dict.fromkeys(__all__, "any_module") | {"Trace": "live", "predict_peak": "predict"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
