"""A solver that proves how many solutions a puzzle has, and says how hard the proof was.

A cell is a mask of the digits that it may still hold, bit d - 1 for digit d. What follows without
guessing is found by naked singles (one digit left for a cell) and hidden singles (one cell left for a
digit); where nothing follows, the cell with the fewest digits left is tried with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from random import Random

from lib.data.sudoku.board import SIDES, Board, board_of

MANY = 2  # solutions, at which counting stops


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
    search = _Search(board, limit=MANY)
    masks = _masks(board, puzzle)
    if not _settle(board, masks, [cell for cell, digit in enumerate(puzzle) if digit]):
        return Proof(0, None, 1)
    search.run(masks)
    found = search.found
    digits = tuple(mask.bit_length() for mask in found[0]) if found else None
    return Proof(len(found), digits, search.backtracks)


def other_solution(board: Board, puzzle: Sequence[int], cell: int, digit: int) -> tuple[int, ...] | None:
    """A solution of `puzzle`, whose `cell` is empty, with another digit there than `digit`, if any."""
    masks, bit = _masks(board, puzzle), 1 << (digit - 1)
    taken = 0
    for peer in board.peers[cell]:
        if puzzle[peer]:
            taken |= masks[peer]
    masks[cell] &= ~(bit | taken)
    if not masks[cell]:  # the usual case while there are many clues
        return None
    if not _settle(board, masks, [one for one, clue in enumerate(puzzle) if clue]):
        return None
    search = _Search(board, limit=1)
    search.run(masks)
    return tuple(mask.bit_length() for mask in search.found[0]) if search.found else None


def random_grid(board: Board, random: Random) -> tuple[int, ...]:
    """A solved board. Every one can come out; they are not all equally likely."""
    search = _Search(board, limit=1, random=random)
    masks = _masks(board, [0] * board.cells)
    first = list(range(board.side))
    random.shuffle(first)
    for cell, place in enumerate(first):
        masks[cell] = 1 << place
    assert _settle(board, masks, list(range(board.side)))
    search.run(masks)
    return tuple(mask.bit_length() for mask in search.found[0])


def all_grids(board: Board) -> list[tuple[int, ...]]:
    """Every solved board, in rising order: 288 of 4x4. (Of 9x9 there are too many.)"""
    assert board.side == 4
    search = _Search(board, limit=1 << 30)
    search.run(_masks(board, [0] * board.cells))
    return sorted(tuple(mask.bit_length() for mask in masks) for masks in search.found)


class _Search:
    """Depth first through what singles leave open."""

    def __init__(self, board: Board, *, limit: int, random: Random | None = None) -> None:
        self.found: list[list[int]] = []
        self.backtracks = 0
        self._board, self._limit, self._random = board, limit, random

    def run(self, masks: list[int]) -> None:
        cell = _narrowest(masks)
        if cell is None:
            self.found.append(masks)
            return
        bits = [1 << place for place in range(self._board.side) if masks[cell] >> place & 1]
        if self._random is not None:
            self._random.shuffle(bits)
        for bit in bits:
            tried = masks.copy()
            tried[cell] = bit
            if _settle(self._board, tried, [cell]):
                self.run(tried)
            else:
                self.backtracks += 1
            if len(self.found) >= self._limit:
                return


def _masks(board: Board, puzzle: Sequence[int]) -> list[int]:
    full = (1 << board.side) - 1
    return [1 << (digit - 1) if digit else full for digit in puzzle]


def _narrowest(masks: list[int]) -> int | None:
    """The first open cell with the fewest digits left; None where there is no open one."""
    best, fewest = None, 99
    for cell, mask in enumerate(masks):
        if mask & (mask - 1):
            count = mask.bit_count()
            if count == 2:
                return cell
            if count < fewest:
                best, fewest = cell, count
    return best


def _settle(board: Board, masks: list[int], settled: list[int]) -> bool:
    """Draw all conclusions by singles from the cells `settled`; False at a contradiction."""
    peers = board.peers
    while True:
        while settled:
            cell = settled.pop()
            bit = masks[cell]
            for peer in peers[cell]:
                mask = masks[peer]
                if mask & bit:
                    mask ^= bit
                    if not mask:
                        return False
                    masks[peer] = mask
                    if not mask & (mask - 1):
                        settled.append(peer)
        if not _hidden_singles(board, masks, settled):
            return False
        if not settled:
            return True


def _hidden_singles(board: Board, masks: list[int], settled: list[int]) -> bool:
    """Settle the digits that have one place left in a unit; False where one has none."""
    full = (1 << board.side) - 1
    for unit, read in zip(board.units, _readers(board.side), strict=True):
        once = twice = known = 0
        for mask in read(masks):
            twice |= once & mask
            once |= mask
            known |= _SINGLE[mask]
        if once != full:
            return False
        hidden = once & ~(twice | known)
        if not hidden:
            continue
        for cell in unit:
            found = masks[cell] & hidden
            if found:
                if found & (found - 1):
                    return False
                masks[cell] = found
                settled.append(cell)
    return True


# A mask of one digit itself, 0 for the others.
_SINGLE = [mask if mask.bit_count() == 1 else 0 for mask in range(1 << max(SIDES))]


@cache
def _readers(side: int) -> list[Callable[[list[int]], tuple[int, ...]]]:
    """For each unit what reads the masks of its cells at once: most of the time is spent on that."""
    return [itemgetter(*unit) for unit in board_of(side).units]
