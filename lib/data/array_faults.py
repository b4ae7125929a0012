"""What is wrong with the arrays of a part of a data set, in words for the author of its code."""

from __future__ import annotations

from typing import Any

import numpy as np

_INPUTS = {
    (4, "uint8"): "uint8 (N, C, H, W) for images",
    (2, "int64"): "int64 (N, T) or (N, 2, T) for tokens",
    (3, "int64"): "int64 (N, T) or (N, 2, T) for tokens",
    (2, "uint8"): "uint8 (N, L) for puzzles and bytes",
    (2, "float32"): "float32 (N, F) for tables",
}
_TARGETS = {
    (1, "int64"): "int64 (N,) for labels",
    (2, "float32"): "float32 (N, K) for numbers",
    (2, "uint8"): "uint8 (N, L) for puzzles",
    (2, "int32"): "int32 (N, K) for tokens or tags",
}


def described(array: Any) -> str:
    """Return dtype and shape of `array`, or the type of what is no array."""
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__


def array_fault(inputs: Any, targets: Any) -> str:
    """Return why these cannot be the arrays of an `ArrayPart`; "" if they can."""
    for name, array, known in (("inputs", inputs, _INPUTS), ("targets", targets, _TARGETS)):
        if not isinstance(array, np.ndarray) or (array.ndim, array.dtype.name) not in known:
            return f"{name} are {described(array)}, not one of {', '.join(dict.fromkeys(known.values()))}"
    if len(targets) != len(inputs):
        return f"there are {len(inputs)} inputs and {len(targets)} targets"
    of_puzzle, is_row = targets.dtype.name == "uint8", (inputs.ndim, inputs.dtype.name) == (2, "uint8")
    if (of_puzzle and targets.shape != inputs.shape) or (is_row and targets.ndim == 1):
        return f"targets {described(targets)} are not for inputs {described(inputs)}"
    return ""
