"""Optimizers, learning-rate schedules and the exponential moving average of weights.

Data and models are unknown here. Imported by lib/memory, train and scripts.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

Compiler: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]  # of an update in place
