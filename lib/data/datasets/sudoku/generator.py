"""Generator of Sudoku puzzles by difficulty; each has a unique solution and is a function of its number.

Clues of a solved board are removed in random order while the solution stays unique. The rating is the number
of branches that the solver refuted (`solver.prove`). Rare ratings are reached by a random walk: a few clues
are restored, others removed, and the result is kept if it is no further from the level.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import count as count_from
from multiprocessing import get_context, parent_process
from random import Random
from threading import Thread

from lib.data.datasets.sudoku import solver
from lib.data.datasets.sudoku.solver import Board
from lib.rng import key

VERSION = 1  # raise it whenever a puzzle changes

GRIDS, HELD_OUT_GRIDS = 288, 58  # solved 4x4 boards, and those of the test part
PUZZLES_PER_GRID = 50  # of 4x4: about a sixth of those that exist
_WALK_STEPS = 100  # before another solved board
_RESTORED_CLUES = (2, 3, 4)
_CHUNK = 16  # puzzles per process and round


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Difficulty. lowest, highest: ratings. clues: in a puzzle; 0: as few as possible."""

    side: int
    lowest: int
    highest: int
    clues: int = 0

    def distance(self, rating: int) -> int:
        """Return the distance of `rating` from the level."""
        return max(self.lowest - rating, rating - self.highest, 0)


_ANY = 1 << 30
LEVELS = {
    "4x4": Level(side=4, lowest=0, highest=_ANY),
    "easy": Level(side=9, lowest=0, highest=0),  # with a requested number of clues
    "medium": Level(side=9, lowest=1, highest=4),
    "hard": Level(side=9, lowest=5, highest=19),
    "extreme": Level(side=9, lowest=20, highest=_ANY),
}


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A puzzle (0 for an empty cell), its solution and rating."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    rating: int


def puzzles(level: Level, *, part: str, count: int, processes: int = 1) -> Iterator[Puzzle]:
    """Yield `count` distinct puzzles for `part` ("train", "test") with solutions that no other part has.

    Each 9x9 puzzle has its own solution; 4x4 has only 288. `processes` do not change the result.
    """
    make = partial(_puzzle, level, part)
    seen: set[tuple[int, ...]] = set()
    for puzzle in _numbered_puzzles(make, processes=processes):
        # A drawn board may repeat.
        identity = puzzle.question if level.side == 4 else puzzle.answer
        if identity not in seen:
            seen.add(identity)
            yield puzzle
        if len(seen) == count:
            return


def max_puzzles(level: Level, *, part: str) -> int | None:
    """Return the number of distinct puzzles that may be requested; None if unlimited."""
    if level.side != 4:
        return None
    return PUZZLES_PER_GRID * (HELD_OUT_GRIDS if part == "test" else GRIDS - HELD_OUT_GRIDS)


def _numbered_puzzles(make: Callable[[int], Puzzle], *, processes: int) -> Iterator[Puzzle]:
    """Yield puzzles 0, 1, 2 and so on, endlessly."""
    if processes == 1:
        yield from map(make, count_from(0))
    # Not forked, because this process may have threads.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent) as pool:
        for first in count_from(0, _CHUNK * processes):
            yield from pool.map(make, range(first, first + _CHUNK * processes))


def _end_with_parent() -> None:
    """Exit with the parent; a pool's process would otherwise wait forever."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


@cache
def _grids_of(part: str) -> list[tuple[int, ...]]:
    """Return the solved 4x4 boards of a part."""
    grids = solver.all_grids(solver.board_of(4))
    Random(key("sudoku", "grids")).shuffle(grids)
    return grids[:HELD_OUT_GRIDS] if part == "test" else grids[HELD_OUT_GRIDS:]


def _puzzle(level: Level, part: str, number: int) -> Puzzle:
    """Return the puzzle with that number."""
    board, random = solver.board_of(level.side), Random(key("sudoku", part, number))
    grids = _grids_of(part) if level.side == 4 else None
    while True:
        answer = solver.random_grid(board, random) if grids is None else grids[random.randrange(len(grids))]
        digger = _Digger(board, answer)
        question = digger.dig(answer, random, clues=level.clues)
        rating = solver.prove(board, question).backtracks
        for _ in range(0 if level.clues else _WALK_STEPS):
            if not level.distance(rating):
                break
            other = digger.dig(_with_more_clues(question, answer, random), random, clues=0)
            other_rating = solver.prove(board, other).backtracks
            if level.distance(other_rating) <= level.distance(rating):
                question, rating = other, other_rating
        if not level.distance(rating):
            return Puzzle(question, answer, rating)


def _with_more_clues(question: Sequence[int], answer: Sequence[int], random: Random) -> list[int]:
    """Return `question` with a few more clues."""
    filled = list(question)
    empty = [cell for cell, digit in enumerate(question) if not digit]
    for cell in random.sample(empty, _RESTORED_CLUES[random.randrange(len(_RESTORED_CLUES))]):
        filled[cell] = answer[cell]
    return filled


class _Digger:
    """Removes clues of one solved board.

    It caches unavoidable sets (a puzzle without a clue in one has another solution) and clues of unique
    puzzles (a puzzle with all of them is unique), which save searches.
    """

    def __init__(self, board: Board, answer: tuple[int, ...]) -> None:
        self._board, self._answer = board, answer
        self._solution = solver.places_of(board, answer)
        self._unavoidable: list[int] = []  # sets of cells, as bits
        self._enough: list[int] = []

    def dig(self, question: Sequence[int], random: Random, *, clues: int) -> tuple[int, ...]:
        """Remove clues from `question` while its solution stays unique, down to `clues`."""
        cells = [cell for cell, digit in enumerate(question) if digit]
        kept = sum(1 << cell for cell in cells)
        random.shuffle(cells)
        for cell in cells:
            if kept.bit_count() <= clues:
                break
            if not self._is_needed(cell, kept ^ 1 << cell):
                kept ^= 1 << cell
        self._enough.append(kept)
        return tuple(digit if kept >> cell & 1 else 0 for cell, digit in enumerate(self._answer))

    def _is_needed(self, cell: int, kept: int) -> bool:
        """Return whether there is another solution without the clue in `cell`."""
        for cells in self._unavoidable:
            if not cells & kept:
                return True
        for cells in self._enough:
            if cells & kept == cells:
                return False
        found = solver.unavoidable_set(self._board, self._solution, kept, cell)
        if found:
            self._unavoidable.append(found)
        return bool(found)
