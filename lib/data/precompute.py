"""Puzzles changed before training as they would be on the fly."""

from __future__ import annotations

import numpy as np
import torch

from lib.data.augment import draw
from lib.data.datasets.sudoku.symmetry import changed
from lib.data.types import ArrayPart

_AT_ONCE = 8192  # puzzles


def bytes_ahead(part: ArrayPart, *, epochs: int) -> int:
    """Main memory that `changed_ahead` takes."""
    return 2 * part.byte_size * epochs


def changed_ahead(part: ArrayPart, *, box: int, seed: int, epochs: int, fixed: int = 0) -> ArrayPart:
    """Every sample of `part` as epochs 0, 1, ... of training see it: sample i of epoch e at e * size + i."""
    inputs_NL, targets_NL = map(torch.from_numpy, part.take())
    size, end = part.size, part.size * epochs
    made = tuple(np.empty((end, inputs_NL.shape[1]), np.uint8) for _ in range(2))
    for start in range(0, end, _AT_ONCE):
        places = torch.arange(start, min(start + _AT_ONCE, end))
        epochs_N, indices_N = places // size, places % size
        draws = draw(epochs_N, indices_N, kind="symmetries", pad=0, seed=seed, fixed=fixed)
        boards = changed(inputs_NL[indices_N], targets_NL[indices_N], draws, box=box)
        for whole, board_NL in zip(made, boards, strict=True):
            whole[start : start + len(places)] = board_NL.numpy()
    return ArrayPart(inputs=made[0], targets=made[1])
