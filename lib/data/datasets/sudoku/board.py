"""The geometry of a Sudoku board: which cells exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

SIDES = (4, 9)


@dataclass(frozen=True, slots=True)
class Board:
    """A board of side * side cells, numbered row by row, in square boxes of box * box.

    units: the rows, columns and boxes, each with every digit once.
    peers: for each cell the others of its units.
    """

    side: int
    box: int
    units: tuple[tuple[int, ...], ...]
    peers: tuple[tuple[int, ...], ...]

    @property
    def cells(self) -> int:
        return self.side * self.side


@cache
def board_of(side: int) -> Board:
    """The board of 4x4 or 9x9."""
    assert side in SIDES, side
    box, lines = round(side**0.5), range(side)
    rows = [tuple(row * side + column for column in lines) for row in lines]
    columns = [tuple(row * side + column for row in lines) for column in lines]
    corners = [(top, left) for top in range(0, side, box) for left in range(0, side, box)]
    boxes = [
        tuple((top + row) * side + left + column for row in range(box) for column in range(box))
        for top, left in corners
    ]
    units = (*rows, *columns, *boxes)
    peers = tuple(
        tuple(sorted({other for unit in units if cell in unit for other in unit} - {cell}))
        for cell in range(side * side)
    )
    return Board(side=side, box=box, units=units, peers=peers)
