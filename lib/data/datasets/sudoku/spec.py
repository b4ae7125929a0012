"""Spec of Sudoku puzzles, and their symmetries.

Symmetries: digits are permuted; bands, rows within a band, stacks and columns within a stack are permuted;
half of the boards are transposed (for 9x9 9! * 6^8 * 2 = 1.2e12). Each is a function of one hash, which
`lib.data.augment` draws from (seed, epoch, index).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lib.data.types import InputDtype, Part
from lib.errors import ConfigError
from lib.rng import mix

BLANK = 1  # token of an empty cell; digit d is token d + 1, and 0 stands for no cell
# Uses of a sample's hash; each derives hashes of its own.
_DIGITS, _BANDS, _ROWS, _STACKS, _COLUMNS = range(5)
_USES = 128  # hashes for each use


def _lines(hashes_N: Tensor, box: int, *, bands: int, within: int) -> Tensor:
    """Return the permutation of rows or columns: (N, side)."""
    bands_NB = _permutation(hashes_N, box, use=bands)
    lines_NBB = _words(hashes_N, box * box, use=within).view(-1, box, box).argsort(dim=2)
    return (bands_NB[:, :, None] * box + lines_NBB).flatten(1)


def _permutation(hashes_N: Tensor, size: int, *, use: int) -> Tensor:
    """Return a permutation for each hash: (N, size)."""
    return _words(hashes_N, size, use=use).argsort(dim=1)


def _words(hashes_N: Tensor, count: int, *, use: int) -> Tensor:
    numbers = torch.arange(use * _USES, use * _USES + count, device=hashes_N.device)
    return mix(mix(hashes_N)[:, None] ^ numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PuzzleSpec:
    """Puzzles on a square board.

    Inputs and targets are int64 (N, side * side): 0 for no cell, 1 for an empty one, and d + 1 for digit d.
    """

    input_dtype: ClassVar[InputDtype] = "int64"

    name: str
    side: int
    synthetic: bool

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.side + 2

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (self.side * self.side,)

    def check_held_out(self, train: Part, held_out: Part) -> None:
        """Raise ConfigError if the parts share solutions."""
        solutions = [{row.tobytes() for row in part.take()[1]} for part in (train, held_out)]
        if shared := len(solutions[0] & solutions[1]):
            setting = f"CONFIG_HOLDOUT={held_out.size}"
            raise ConfigError(
                f"{setting} holds out puzzles with {shared} solutions that are trained on",
                todo="leave it at 0: the test part has solutions of its own",
            )

    def transformed(self, inputs_NL: Tensor, targets_NL: Tensor, hashes_N: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the symmetry of each hash (N,) to tokens (N, L) of puzzles and solutions."""
        side, box = self.side, round(self.side**0.5)
        rows_NS = _lines(hashes_N, box, bands=_BANDS, within=_ROWS)
        columns_NS = _lines(hashes_N, box, bands=_STACKS, within=_COLUMNS)
        cells_NSS = rows_NS[:, :, None] * side + columns_NS[:, None, :]
        transposed_N = (hashes_N & 1).to(torch.bool)
        cells_NSS = torch.where(transposed_N[:, None, None], cells_NSS.transpose(1, 2), cells_NSS)
        cells_NL = cells_NSS.flatten(1)
        digits_NS = _permutation(hashes_N, side, use=_DIGITS) + BLANK + 1
        kept = torch.arange(BLANK + 1, device=hashes_N.device).expand(len(hashes_N), -1)
        names_NV = torch.cat((kept, digits_NS), dim=1)
        one, other = (names_NV.gather(1, part.gather(1, cells_NL).long()) for part in (inputs_NL, targets_NL))
        return one, other
