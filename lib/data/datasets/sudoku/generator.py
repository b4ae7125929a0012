"""Puzzles of a wanted difficulty, each proved to have one solution, and each a function of its number.

A puzzle is dug out of a solved board: clues are taken away in random order as long as the solution stays
the only one. Its rating is the number of branches that the solver had to close for the proof
(`solver.prove`). A rare rating is reached by a walk: a few clues are put back, others are taken away, and
what comes out is kept where it is no further from what is wanted.
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

from lib.data.datasets.sudoku.board import Board, board_of
from lib.data.datasets.sudoku.solver import all_grids, places_of, prove, random_grid, unavoidable_set
from lib.rng import key

VERSION = 1  # raise it whenever a puzzle changes

GRIDS, HELD_OUT_GRIDS = 288, 58  # solved boards of 4x4, and those of the test part
PUZZLES_OF_A_GRID = 50  # of 4x4, that are looked for: about a sixth of those that digging can leave
_WALK_STEPS = 100  # before another solved board is tried
_CLUES_BACK = (2, 3, 4)
_AT_ONCE = 16  # puzzles handed to each process


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """lowest, highest: ratings. clues: left in a puzzle; 0 = as few as digging leaves."""

    side: int
    lowest: int
    highest: int
    clues: int = 0

    def distance(self, rating: int) -> int:
        """How far `rating` is from what is wanted."""
        return max(self.lowest - rating, rating - self.highest, 0)


_ANY = 1 << 30
LEVELS = {
    "4x4": Level(side=4, lowest=0, highest=_ANY),
    "easy": Level(side=9, lowest=0, highest=0),  # its clues are asked for
    "medium": Level(side=9, lowest=1, highest=4),
    "hard": Level(side=9, lowest=5, highest=19),
    "extreme": Level(side=9, lowest=20, highest=_ANY),
}


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Digits cell by cell, 0 for an empty one; the solution; the rating."""

    question: tuple[int, ...]
    answer: tuple[int, ...]
    rating: int


def puzzles(level: Level, *, part: str, count: int, processes: int = 1) -> Iterator[Puzzle]:
    """`count` different puzzles for `part` ("train", "test"), whose solutions are in no other part.

    Each of 9x9 has a solution of its own. Of 4x4 there are 288, most of which are for training.
    processes: that work on them; what comes out does not depend on it.
    """
    make = partial(_numbered, level, part)
    seen: set[tuple[int, ...]] = set()
    for puzzle in _made(make, processes=processes):
        # Where solved boards are drawn, one might come twice; a part would lose its promise.
        mark = puzzle.question if level.side == 4 else puzzle.answer
        if mark not in seen:
            seen.add(mark)
            yield puzzle
        if len(seen) == count:
            return


def most_puzzles(level: Level, *, part: str) -> int | None:
    """How many different puzzles may be asked for; None where there is no end of them."""
    if level.side != 4:
        return None
    return PUZZLES_OF_A_GRID * (HELD_OUT_GRIDS if part == "test" else GRIDS - HELD_OUT_GRIDS)


def _made(make: Callable[[int], Puzzle], *, processes: int) -> Iterator[Puzzle]:
    """Puzzles 0, 1, 2 and so on, without end."""
    if processes == 1:
        yield from map(make, count_from(0))
    # Not forked: this process may have threads, of torch among others.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent) as pool:
        for first in count_from(0, _AT_ONCE * processes):
            yield from pool.map(make, range(first, first + _AT_ONCE * processes))


def _end_with_parent() -> None:
    """A process of a pool waits for work for ever, also where the one that gives it was killed."""

    def watch() -> None:
        parent = parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _numbered(level: Level, part: str, number: int) -> Puzzle:
    """The puzzle with that number: a function of nothing else."""
    grids = _grids_of(part) if level.side == 4 else None
    return _puzzle(board_of(level.side), level, Random(key("sudoku", part, number)), grids)


@cache
def _grids_of(part: str) -> list[tuple[int, ...]]:
    """Solved boards of 4x4."""
    grids = all_grids(board_of(4))
    Random(key("sudoku", "grids")).shuffle(grids)
    return grids[:HELD_OUT_GRIDS] if part == "test" else grids[HELD_OUT_GRIDS:]


def _puzzle(board: Board, level: Level, random: Random, grids: Sequence[tuple[int, ...]] | None) -> Puzzle:
    while True:
        answer = random_grid(board, random) if grids is None else grids[random.randrange(len(grids))]
        digger = _Digger(board, answer)
        question = digger.dug(answer, random, clues=level.clues)
        rating = prove(board, question).backtracks
        for _ in range(0 if level.clues else _WALK_STEPS):
            if not level.distance(rating):
                break
            other = digger.dug(_filled(question, answer, random), random, clues=0)
            other_rating = prove(board, other).backtracks
            if level.distance(other_rating) <= level.distance(rating):
                question, rating = other, other_rating
        if not level.distance(rating):
            return Puzzle(question, answer, rating)


def _filled(question: Sequence[int], answer: Sequence[int], random: Random) -> list[int]:
    """`question` with a few more clues."""
    filled = list(question)
    empty = [cell for cell, digit in enumerate(question) if not digit]
    for cell in random.sample(empty, _CLUES_BACK[random.randrange(len(_CLUES_BACK))]):
        filled[cell] = answer[cell]
    return filled


class _Digger:
    """Takes clues of one solved board away.

    It remembers where other solutions that it came across differ from the board: a puzzle with no clue
    in one of these sets has that other solution, too. And it remembers the puzzles that it has dug: one with
    all of their clues has no other solution either. Neither needs to be searched for one.
    """

    def __init__(self, board: Board, answer: tuple[int, ...]) -> None:
        self._board, self._answer = board, answer
        self._solution = places_of(board, answer)
        self._unavoidable: list[int] = []  # sets of cells, as bits
        self._enough: list[int] = []

    def dug(self, question: Sequence[int], random: Random, *, clues: int) -> tuple[int, ...]:
        """`question` without clues that its one solution does not need, down to `clues` of them."""
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
        """Whether there is another solution without a clue in `cell`."""
        for cells in self._unavoidable:
            if not cells & kept:
                return True
        for cells in self._enough:
            if cells & kept == cells:
                return False
        found = unavoidable_set(self._board, self._solution, kept, cell)
        if found:
            self._unavoidable.append(found)
        return bool(found)
