"""The symmetries of Sudoku, drawn for each sample and applied to whole batches at once.

Digits change their names; bands, rows within a band, stacks and columns within a stack change places; half
of the boards are transposed: for 9x9 9! * 6^8 * 2 = 1.2e12 ways. Each is a function of one hash, which
`lib.data.augment` draws from (seed, epoch, index), so that worker, rank and batch do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lib.data.datasets.sudoku.table import BLANK
from lib.rng import mix

# What the hash of a sample is used for: each use takes hashes of its own from it.
_DIGITS, _BANDS, _ROWS, _STACKS, _COLUMNS = range(5)
_USES = 128  # hashes for each use


def changed(
    inputs_NL: Tensor, targets_NL: Tensor, draws: Sequence[Tensor], *, box: int
) -> tuple[Tensor, Tensor]:
    """What `lib.data.augment.draw` drew for each sample: a symmetry, or itself where a 0 is beside it."""
    boards = transformed(inputs_NL, targets_NL, draws[0], box=box)
    if len(draws) == 1:
        return boards
    same_N1 = draws[1][:, None] == 0
    return torch.where(same_N1, inputs_NL, boards[0]), torch.where(same_N1, targets_NL, boards[1])


def transformed(
    inputs_NL: Tensor, targets_NL: Tensor, hashes_N: Tensor, *, box: int
) -> tuple[Tensor, Tensor]:
    """Tokens (N, L) of puzzles and solutions, both changed by the symmetry that the hash (N,) stands for."""
    side = box * box
    rows_NS = _lines(hashes_N, box, bands=_BANDS, within=_ROWS)
    columns_NS = _lines(hashes_N, box, bands=_STACKS, within=_COLUMNS)
    cells_NSS = rows_NS[:, :, None] * side + columns_NS[:, None, :]
    turned_N = (hashes_N & 1).to(torch.bool)
    cells_NSS = torch.where(turned_N[:, None, None], cells_NSS.transpose(1, 2), cells_NSS)
    cells_NL = cells_NSS.flatten(1)
    digits_NS = _order(hashes_N, side, use=_DIGITS) + BLANK + 1
    kept = torch.arange(BLANK + 1, device=hashes_N.device).expand(len(hashes_N), -1)
    names_NV = torch.cat((kept, digits_NS), dim=1)
    one, other = (names_NV.gather(1, part.gather(1, cells_NL).long()) for part in (inputs_NL, targets_NL))
    return one, other


def _lines(hashes_N: Tensor, box: int, *, bands: int, within: int) -> Tensor:
    """(N, side): which row, or column, comes to each place."""
    bands_NB = _order(hashes_N, box, use=bands)
    lines_NBB = _words(hashes_N, box * box, use=within).view(-1, box, box).argsort(dim=2)
    return (bands_NB[:, :, None] * box + lines_NBB).flatten(1)


def _order(hashes_N: Tensor, size: int, *, use: int) -> Tensor:
    """(N, size): a permutation for each hash."""
    return _words(hashes_N, size, use=use).argsort(dim=1)


def _words(hashes_N: Tensor, count: int, *, use: int) -> Tensor:
    numbers = torch.arange(use * _USES, use * _USES + count, device=hashes_N.device)
    return mix(mix(hashes_N)[:, None] ^ numbers)
