"""A solver that proves how many solutions a puzzle has, and says how hard the proof was.

What is still possible is one integer: bit (digit - 1) * cells + cell says that the cell may hold the digit.
An operation on it works on all of them at once. What follows without guessing is found by naked singles
(one digit left for a cell) and hidden singles (one cell left for a digit in a row, column or box); where
nothing follows, the first of the cells with the fewest digits left is tried with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TypeAlias

from lib.data.datasets.sudoku.board import Board, board_of

MANY = 2  # solutions, at which counting stops

# What is possible, and what of it is settled, with all that follows from it.
Settled: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Proof:
    """solutions: 0, 1, or MANY for any number above. solution: digits of the first one, if there is one.

    backtracks: branches that ended in a contradiction on the way to the whole proof.
    """

    solutions: int
    solution: tuple[int, ...] | None
    backtracks: int


def prove(board: Board, puzzle: Sequence[int]) -> Proof:
    """How many solutions `puzzle` has: digits cell by cell, 0 for an empty one."""
    search, clues = _Search(board, limit=MANY), places_of(board, puzzle)
    if not search.run(_without_rivals(board, clues), clues):
        return Proof(0, None, 1)
    found = search.found
    return Proof(len(found), _digits(board, found[0]) if found else None, search.backtracks)


def unavoidable_set(board: Board, solution: int, kept: int, cell: int) -> int:
    """Where another solution of a puzzle, with something else in `cell`, differs from `solution`.

    solution: as `places_of` makes it. kept: the cells that have clues, as bits; `cell` is not one of them.
    What comes out are cells as bits, none of which has a clue; 0 where there is no such solution.
    """
    bits = _bits_of(board.side)
    clues = solution & kept * bits.digits
    possible = _without_rivals(board, clues) & ~(solution & bits.digits << cell)
    if not possible & bits.digits << cell:  # the usual case while there are many clues
        return 0
    search = _Search(board, limit=1)
    search.run(possible, clues)
    return _cells(board, search.found[0] ^ search.found[0] & solution) if search.found else 0


def random_grid(board: Board, random: Random) -> tuple[int, ...]:
    """A solved board. Every one can come out; they are not all equally likely."""
    first = list(range(1, board.side + 1))
    random.shuffle(first)
    clues = places_of(board, first)
    search = _Search(board, limit=1, random=random)
    search.run(_without_rivals(board, clues), clues)
    return _digits(board, search.found[0])


def all_grids(board: Board) -> list[tuple[int, ...]]:
    """Every solved board, in rising order: 288 of 4x4. (Of 9x9 there are too many.)"""
    assert board.side == 4
    search = _Search(board, limit=1 << 30)
    search.run(_bits_of(board.side).every, 0)
    return sorted(_digits(board, found) for found in search.found)


def places_of(board: Board, puzzle: Sequence[int]) -> int:
    """The digits of `puzzle` as bits, without the empty cells."""
    return sum(1 << (digit - 1) * board.cells + cell for cell, digit in enumerate(puzzle) if digit)


class _Search:
    """Depth first through what singles leave open."""

    def __init__(self, board: Board, *, limit: int, random: Random | None = None) -> None:
        self.found: list[int] = []
        self.backtracks = 0
        self._board, self._limit, self._random = board, limit, random
        self._bits, self._settle = _bits_of(board.side), _settling(board.side)

    def run(self, possible: int, settled: int) -> bool:
        """Go through all that is `possible`; False where it is a contradiction without a guess."""
        concluded = self._settle(possible, settled)
        if concluded is None:
            return False
        possible, settled = concluded
        cell = _narrowest(self._board, possible)
        if cell is None:
            self.found.append(possible)
            return True
        cells = self._board.cells
        places = [place for place in range(cell, self._board.side * cells, cells) if possible >> place & 1]
        if self._random is not None:
            self._random.shuffle(places)
        for place in places:
            if not self.run(possible & self._bits.beside[place], settled):
                self.backtracks += 1
            if len(self.found) >= self._limit:
                break
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bits:
    """Constants of a board.

    every:  all digits in all cells.
    cells:  one digit in all cells. digits: all digits in the first cell.
    beside: by place, what is still possible beside the digit that is in the cell.
    """

    every: int
    cells: int
    digits: int
    beside: tuple[int, ...]


@cache
def _bits_of(side: int) -> _Bits:
    board = board_of(side)
    cells, every = board.cells, (1 << side * board.cells) - 1
    digits = sum(1 << digit * cells for digit in range(side))
    beside = [
        every & ~(digits << cell | sum(1 << digit * cells + peer for peer in board.peers[cell]))
        | 1 << digit * cells + cell
        for digit in range(side)
        for cell in range(cells)
    ]
    return _Bits(every=every, cells=(1 << cells) - 1, digits=digits, beside=tuple(beside))


def _without_rivals(board: Board, clues: int) -> int:
    """What the rules leave possible beside `clues`."""
    bits = _bits_of(board.side)
    possible = bits.every
    while clues:
        clue = clues & -clues
        possible &= bits.beside[clue.bit_length() - 1]
        clues ^= clue
    return possible


@cache
def _settling(side: int) -> Callable[[int, int], Settled | None]:
    """A function that draws all conclusions by singles, of what is possible and what of it is settled.

    It gives None at a contradiction. For each place it counts how often the digit is possible in the row,
    the column and the box, and how many digits are in the cell: once, or twice and more. That is found for
    all of them at once, by adding threes (twos on 4x4) of neighbours and then threes of these sums, and is
    read at the first place of each.
    """
    bits, box, cells = _bits_of(side), board_of(side).box, side * side
    steps = {step: (step, 2 * step if box == 3 else side * cells) for step in _steps(side)}
    column, stack, row, band, digit, digits = (steps[step] for step in _steps(side))
    line, tower = (1 << side) - 1, sum(1 << side * number for number in range(side))
    square = sum(1 << side * down + right for down in range(box) for right in range(box))
    rows = bits.digits * tower
    columns = bits.digits * line
    boxes = bits.digits * sum(1 << box * (side * down + right) for down in range(box) for right in range(box))
    firsts, all_digits, beside = bits.cells, bits.digits, bits.beside

    def settle(possible: int, settled: int) -> Settled | None:
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

    return settle


def _steps(side: int) -> tuple[int, ...]:
    """To the next column, stack, row, band, digit, and digits by threes."""
    box = board_of(side).box
    return 1, box, side, side * box, side * side, side * side * box


def _sum(once: int, twice: int, step: int, leap: int) -> tuple[int, int]:
    """At each place: whether something is here, a step or a leap further, and whether it is so twice."""
    second, third = once >> step, once >> leap
    both = once | second
    twice |= twice >> step | twice >> leap | once & second | both & third
    return both | third, twice


def _narrowest(board: Board, possible: int) -> int | None:
    """The first open cell with the fewest digits left; None where there is no open one."""
    bits = _bits_of(board.side)
    once = twice = thrice = 0
    rest = possible
    while rest:
        here = rest & bits.cells
        thrice |= twice & here
        twice |= once & here
        once |= here
        rest >>= board.cells
    if pairs := twice ^ thrice:
        return (pairs & -pairs).bit_length() - 1
    open_cells = [cell for cell in range(board.cells) if thrice >> cell & 1]
    return min(open_cells, key=lambda cell: (possible >> cell & bits.digits).bit_count(), default=None)


def _cells(board: Board, places: int) -> int:
    """The cells of `places`, as bits."""
    cells = 0
    while places:
        cells |= places
        places >>= board.cells
    return cells & _bits_of(board.side).cells


def _digits(board: Board, solution: int) -> tuple[int, ...]:
    """The digits of a solution, cell by cell."""
    digits = _bits_of(board.side).digits
    return tuple((solution >> cell & digits).bit_length() // board.cells + 1 for cell in range(board.cells))
