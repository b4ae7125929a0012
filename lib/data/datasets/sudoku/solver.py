"""Sudoku solver that counts solutions and measures the difficulty of the proof.

Candidates are one integer: bit (digit - 1) * cells + cell is set if the cell may hold the digit, so that one
operation works on all of them. Naked singles (one digit left for a cell) and hidden singles (one cell left
for a digit in a row, column or box) are propagated; then the first cell with the fewest candidates is
branched on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TypeAlias

SIDES = (4, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A board of side * side cells, numbered row by row, with square boxes of box * box, and its bit masks.

    units: rows, columns and boxes. peers: for each cell the other cells of its units. every: all digits in
    all cells. firsts: one digit in all cells. digits: all digits in the first cell. beside: by place, the
    candidates that remain if the digit is in the cell.
    """

    side: int
    box: int
    cells: int
    units: tuple[tuple[int, ...], ...]
    peers: tuple[tuple[int, ...], ...]
    every: int
    firsts: int
    digits: int
    beside: tuple[int, ...]


@cache
def board_of(side: int) -> Board:
    """Return the 4x4 or 9x9 board."""
    assert side in SIDES, side
    box, cells, lines = round(side**0.5), side * side, range(side)
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
        for cell in range(cells)
    )
    every, digits = (1 << side * cells) - 1, sum(1 << digit * cells for digit in lines)
    beside = tuple(
        every & ~(digits << cell | sum(1 << digit * cells + peer for peer in peers[cell]))
        | 1 << digit * cells + cell
        for digit in lines
        for cell in range(cells)
    )
    sizes = {"side": side, "box": box, "cells": cells}
    masks = {"every": every, "firsts": (1 << cells) - 1, "digits": digits}
    return Board(**sizes, **masks, units=units, peers=peers, beside=beside)


MANY = 2  # solutions at which counting stops

# Candidates, and those that are propagated singles.
Propagated: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Proof:
    """Number of solutions (0, 1 or MANY), digits of the first one, and number of refuted branches."""

    solutions: int
    solution: tuple[int, ...] | None
    backtracks: int


def prove(board: Board, puzzle: Sequence[int]) -> Proof:
    """Count the solutions of `puzzle`: digits cell by cell, 0 for an empty one."""
    search, clues = _Search(board, limit=MANY), places_of(board, puzzle)
    if not search.run(_candidates(board, clues), clues):
        return Proof(0, None, 1)
    found = search.found
    return Proof(len(found), _digits(board, found[0]) if found else None, search.backtracks)


def unavoidable_set(board: Board, solution: int, kept: int, cell: int) -> int:
    """Return the cells, as bits, in which another solution with a different digit in `cell` differs.

    solution: from `places_of`. kept: bits of the cells with clues but `cell`. 0 without such a solution.
    """
    clues = solution & kept * board.digits
    possible = _candidates(board, clues) & ~(solution & board.digits << cell)
    if not possible & board.digits << cell:  # the usual case while there are many clues
        return 0
    search = _Search(board, limit=1)
    search.run(possible, clues)
    return _cells(board, search.found[0] ^ search.found[0] & solution) if search.found else 0


def random_grid(board: Board, random: Random) -> tuple[int, ...]:
    """Draw a solved board (not uniformly)."""
    first = list(range(1, board.side + 1))
    random.shuffle(first)
    clues = places_of(board, first)
    search = _Search(board, limit=1, random=random)
    search.run(_candidates(board, clues), clues)
    return _digits(board, search.found[0])


def all_grids(board: Board) -> list[tuple[int, ...]]:
    """Return every solved 4x4 board in ascending order: 288."""
    assert board.side == 4
    search = _Search(board, limit=1 << 30)
    search.run(board.every, 0)
    return sorted(_digits(board, found) for found in search.found)


def places_of(board: Board, puzzle: Sequence[int]) -> int:
    """Encode the digits of `puzzle` as bits."""
    return sum(1 << (digit - 1) * board.cells + cell for cell, digit in enumerate(puzzle) if digit)


class _Search:
    """Depth-first search with propagation of singles."""

    def __init__(self, board: Board, *, limit: int, random: Random | None = None) -> None:
        self.found: list[int] = []
        self.backtracks = 0
        self._board, self._limit, self._random = board, limit, random
        self._propagate = _propagation(board.side)

    def run(self, possible: int, settled: int) -> bool:
        """Search the candidates; False if propagation alone finds a contradiction."""
        propagated = self._propagate(possible, settled)
        if propagated is None:
            return False
        possible, settled = propagated
        cell = _branch_cell(self._board, possible)
        if cell is None:
            self.found.append(possible)
            return True
        cells = self._board.cells
        places = [place for place in range(cell, self._board.side * cells, cells) if possible >> place & 1]
        if self._random is not None:
            self._random.shuffle(places)
        for place in places:
            if not self.run(possible & self._board.beside[place], settled):
                self.backtracks += 1
            if len(self.found) >= self._limit:
                break
        return True


def _candidates(board: Board, clues: int) -> int:
    """Return the candidates that `clues` leave."""
    possible = board.every
    while clues:
        clue = clues & -clues
        possible &= board.beside[clue.bit_length() - 1]
        clues ^= clue
    return possible


@cache
def _propagation(side: int) -> Callable[[int, int], Propagated | None]:
    """Return a function that propagates singles among candidates; it returns None at a contradiction.

    For all units and cells at once it counts whether a digit is possible once, or twice and more, by adding
    threes (twos on 4x4) of neighbours and then threes of these sums; a count is read at the first place.
    """
    board = board_of(side)
    box, cells = board.box, board.cells
    # Bit distances to the next column, stack, row, band, digit and third digit, once and twice.
    steps = (1, box, side, side * box, cells, cells * box)
    column, stack, row, band, digit, digits = (
        (step, 2 * step if box == 3 else side * cells) for step in steps
    )
    line, tower = (1 << side) - 1, sum(1 << side * number for number in range(side))
    square = sum(1 << side * down + right for down in range(box) for right in range(box))
    rows = board.digits * tower
    columns = board.digits * line
    boxes = board.digits * sum(
        1 << box * (side * down + right) for down in range(box) for right in range(box)
    )
    firsts, all_digits, beside = board.firsts, board.digits, board.beside

    def propagate(possible: int, settled: int) -> Propagated | None:
        while True:
            once, twice = _sum(*_sum(possible, 0, *digit), *digits)
            if once & firsts != firsts:  # a cell without a digit: the usual contradiction
                return None
            single = (firsts ^ twice & firsts) * all_digits
            once, twice = _sum(*_sum(possible, 0, *row), *band)
            if once & columns != columns:
                return None
            single |= (columns ^ twice & columns) * tower
            three = _sum(possible, 0, *column)
            once, twice = _sum(*three, *stack)
            if once & rows != rows:
                return None
            single |= (rows ^ twice & rows) * line
            once, twice = _sum(*three, *row)
            if once & boxes != boxes:
                return None
            single |= (boxes ^ twice & boxes) * square
            single &= possible
            new = single ^ settled
            if not new:
                return possible, settled
            settled = single
            while new:
                place = new & -new
                possible &= beside[place.bit_length() - 1]
                new ^= place

    return propagate


def _sum(once: int, twice: int, step: int, leap: int) -> tuple[int, int]:
    """Add three places at each: bits set at least once, and at least twice."""
    second, third = once >> step, once >> leap
    both = once | second
    twice |= twice >> step | twice >> leap | once & second | both & third
    return both | third, twice


def _branch_cell(board: Board, possible: int) -> int | None:
    """Return the first open cell with the fewest candidates; None if all are solved."""
    once = twice = thrice = 0
    rest = possible
    while rest:
        here = rest & board.firsts
        thrice |= twice & here
        twice |= once & here
        once |= here
        rest >>= board.cells
    if pairs := twice ^ thrice:
        return (pairs & -pairs).bit_length() - 1
    open_cells = [cell for cell in range(board.cells) if thrice >> cell & 1]
    return min(open_cells, key=lambda cell: (possible >> cell & board.digits).bit_count(), default=None)


def _cells(board: Board, places: int) -> int:
    """Return the cells of `places` as bits."""
    cells = 0
    while places:
        cells |= places
        places >>= board.cells
    return cells & board.firsts


def _digits(board: Board, solution: int) -> tuple[int, ...]:
    """Return the digits of a solution, cell by cell."""
    return tuple(
        (solution >> cell & board.digits).bit_length() // board.cells + 1 for cell in range(board.cells)
    )
