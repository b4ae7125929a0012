"""Small puzzles in memory for tests of recursive models, and an exact-cover solver that only tests have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from lib.config import Config
from lib.data.datasets.sudoku.generator import LEVELS, Puzzle, puzzles
from lib.data.datasets.sudoku.spec import PuzzleSpec
from lib.data.types import ArrayPart, Dataset
from tests.support.configs import changed
from tests.support.simulated import make_training_data
from tests.support.training import small_config
from train.training_data import TrainingData

SPEC = PuzzleSpec(name="sudoku", side=4, synthetic=True)


@cache
def small_puzzles(part: str, count: int) -> tuple[Puzzle, ...]:
    return tuple(puzzles(LEVELS["4x4"], part=part, count=count))


def part_of(rows: Sequence[Puzzle]) -> ArrayPart:
    """Digit d is token d + 1, and so is an empty cell, which is 0."""
    inputs, targets = (
        np.array([getattr(row, name) for row in rows], np.uint8) + np.uint8(1)
        for name in ("question", "answer")
    )
    return ArrayPart(inputs, targets)


def small_trm_config(**changes: object) -> Config:
    """Three steps of a network of 8 channels on 4x4, with SGD."""
    config = small_config("trm")
    options = {**config.model_options, "width": 8, "heads": 2, "h_cycles": 2, "l_cycles": 2}
    options |= {"multiple": 8, "puzzle_tokens": 2}
    settings = {"augment": "none", "ema": False, "halt_max_steps": 4, "eval_steps": 4, "weight_decay": 0.0}
    return changed(config, **{"model_options": options} | settings | changes)


def puzzle_data(config: Config, *, train: int = 48, test: int = 10) -> TrainingData:
    parts = (part_of(small_puzzles(name, size)) for name, size in (("train", train), ("test", test)))
    return make_training_data(config, Dataset(SPEC, *parts, "puzzles"))


def solutions(puzzle: Sequence[int], *, most: int = 2) -> list[tuple[int, ...]]:
    """Up to `most` solutions: an exact cover of cells, and digits of rows, columns and boxes (Knuth's X)."""
    side = round(len(puzzle) ** 0.5)
    choices = {
        (cell, digit): constraints(cell, digit, side)
        for cell in range(side * side)
        for digit in range(1, side + 1)
    }
    columns: dict[object, set[tuple[int, int]]] = {}
    for choice, needs in choices.items():
        for need in needs:
            columns.setdefault(need, set()).add(choice)
    chosen = [(cell, digit) for cell, digit in enumerate(puzzle) if digit]
    for choice in chosen:
        if any(need not in columns for need in choices[choice]):
            return []
        cover(columns, choices, choice)
    found = []
    for solution in covers(columns, choices, chosen):
        found.append(tuple(digit for _, digit in sorted(solution)))
        if len(found) == most:
            break
    return found


def constraints(cell: int, digit: int, side: int) -> list[object]:
    row, column, box = cell // side, cell % side, round(side**0.5)
    place = row // box * box + column // box
    return [("cell", cell), ("row", row, digit), ("column", column, digit), ("box", place, digit)]


def covers(columns: dict, choices: dict, chosen: list) -> Iterator[list]:
    if not columns:
        yield list(chosen)
        return
    tightest = min(columns, key=lambda need: len(columns[need]))
    for choice in list(columns[tightest]):
        removed = cover(columns, choices, choice)
        yield from covers(columns, choices, [*chosen, choice])
        uncover(columns, choices, choice, removed)


def cover(columns: dict, choices: dict, choice: tuple[int, int]) -> list:
    removed = []
    for need in choices[choice]:
        for other in columns[need]:
            for further in choices[other]:
                if further != need:
                    columns[further].discard(other)
        removed.append(columns.pop(need))
    return removed


def uncover(columns: dict, choices: dict, choice: tuple[int, int], removed: list) -> None:
    for need in reversed(choices[choice]):
        columns[need] = removed.pop()
        for other in columns[need]:
            for further in choices[other]:
                if further != need:
                    columns[further].add(other)
