"""Puzzles in CSV files with the columns of sudoku-extreme: source, question, answer, rating.

question: cells row by row, a dot (or 0) for an empty one; answer: the same with all digits. What a rating
counts is for the source to say.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lib.data.datasets.sudoku.board import SIDES, board_of
from lib.data.datasets.sudoku.generator import Puzzle
from lib.errors import DataError, os_error

COLUMNS = ("source", "question", "answer", "rating")
BLANK = 1  # the token of an empty cell; digit d is token d + 1, and 0 stands for no cell at all

Cells = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Table:
    """Tokens of N puzzles (N, side * side) with those of their solutions, and ratings (N,)."""

    side: int
    inputs: Cells
    targets: Cells
    ratings: npt.NDArray[np.int64]


def write_table(file: Path, puzzles: Iterable[Puzzle], *, source: str) -> None:
    """Write `puzzles`, which come from `source`. Raises OSError."""
    with file.open("w", encoding="ascii", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(COLUMNS)
        for puzzle in puzzles:
            question = "".join(str(digit) if digit else "." for digit in puzzle.question)
            writer.writerow((source, question, "".join(map(str, puzzle.answer)), puzzle.rating))


def read_table(file: Path) -> Table:
    """Read puzzles of one size. Raises DataError with the line where a row is no puzzle with its solution."""
    questions, answers, ratings = bytearray(), bytearray(), array("q")
    cells = 0
    try:
        # Spreadsheets begin what they save with a byte order mark.
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened)
            places = _places(file, next(reader, []))
            for row in reader:
                question, answer, rating = _row(file, reader.line_num, row, places, cells=cells)
                cells = cells or len(question)
                questions += question
                answers += answer
                ratings.append(rating)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, OSError):
            raise os_error("read", error) from error
        raise _damaged(file, str(error)) from error
    if not ratings:
        raise _damaged(file, "it holds no puzzles")
    side = round(cells**0.5)
    inputs, targets = (np.frombuffer(part, np.uint8).reshape(-1, cells) for part in (questions, answers))
    table = Table(side, _tokens(inputs), _tokens(targets), np.frombuffer(ratings, np.int64))
    _check(file, table)
    return table


def _places(file: Path, headings: list[str]) -> tuple[int, int, int]:
    missing = [column for column in COLUMNS[1:] if column not in headings]
    if missing:
        raise _damaged(file, f"its first line lacks the column {missing[0]}")
    question, answer, rating = (headings.index(column) for column in COLUMNS[1:])
    return question, answer, rating


def _row(
    file: Path, line: int, row: list[str], places: tuple[int, int, int], *, cells: int
) -> tuple[bytes, bytes, int]:
    try:
        question, answer, rating = (row[place] for place in places)
        texts = question.encode("ascii"), answer.encode("ascii")
        number = int(np.int64(int(rating)))
    except (IndexError, ValueError, OverflowError) as error:
        raise _damaged(file, f"line {line} is no puzzle, solution and rating") from error
    lengths = (cells,) if cells else tuple(side * side for side in SIDES)
    if len(question) not in lengths or len(answer) != len(question):
        raise _damaged(file, f"line {line} has {len(question)} and {len(answer)} cells, not {lengths[-1]}")
    return *texts, number


def _tokens(text: Cells) -> Cells:
    """Tokens of ASCII digits and dots; what is neither becomes a token beyond them all."""
    tokens: Cells = np.where(text == ord("."), BLANK, text - (ord("0") - 1)).astype(np.uint8)
    return tokens


def _check(file: Path, table: Table) -> None:
    """Every row a puzzle, and its answer a solution of it."""
    side, units = table.side, board_of(table.side).units
    complete = np.arange(BLANK + 1, BLANK + 1 + side, dtype=np.uint8)
    blank = table.inputs == BLANK
    wrong = ~(blank | (table.inputs == table.targets)).all(axis=1)
    for unit in units:
        wrong |= (np.sort(table.targets[:, unit], axis=1) != complete).any(axis=1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise _damaged(file, f"puzzle {row + 1} is not answered by its solution")


def _damaged(file: Path, why: str) -> DataError:
    columns = ",".join(COLUMNS)
    return DataError(f"{file} is no file of puzzles", why=why, todo=f"its columns are to be {columns}")
