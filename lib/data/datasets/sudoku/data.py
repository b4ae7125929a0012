"""Sudoku puzzles: generated once and cached, or from CSV files.

CSV columns are those of sudoku-extreme: source, question (cells row by row, a dot or 0 for an empty one),
answer, rating (defined by the source).
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lib.data.cache import cached_folder
from lib.data.datasets.files import DataLocation
from lib.data.datasets.sudoku.generator import LEVELS, VERSION, Level, Puzzle, max_puzzles, puzzles
from lib.data.datasets.sudoku.solver import SIDES, board_of
from lib.data.datasets.sudoku.spec import BLANK, PuzzleSpec
from lib.data.datasets.user_files import find_file
from lib.data.types import ArrayPart, Dataset
from lib.devices.host import cpu_count
from lib.errors import ConfigError, DataError, os_errors

COLUMNS = ("source", "question", "answer", "rating")

Cells = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Table:
    """Tokens of puzzles and solutions, (N, side * side), and ratings (N,)."""

    side: int
    inputs: Cells
    targets: Cells
    ratings: npt.NDArray[np.int64]


def write_table(file: Path, puzzles: Iterable[Puzzle], *, source: str) -> None:
    """Write `puzzles` of origin `source`. Raises OSError."""
    with file.open("w", encoding="ascii", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(COLUMNS)
        for puzzle in puzzles:
            question = "".join(str(digit) if digit else "." for digit in puzzle.question)
            writer.writerow((source, question, "".join(map(str, puzzle.answer)), puzzle.rating))


def read_table(file: Path) -> Table:
    """Read puzzles of one size. Raises DataError with the line of an invalid row."""
    questions, answers, ratings = bytearray(), bytearray(), array("q")
    cells = 0
    try:
        # Spreadsheets write a byte order mark.
        with os_errors("read"), file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.reader(opened)
            headings = next(reader, [])
            if missing := [column for column in COLUMNS[1:] if column not in headings]:
                raise _damaged(file, f"its first line lacks the column {missing[0]}")
            places = [headings.index(column) for column in COLUMNS[1:]]
            for row in reader:
                question, answer, rating = _row(file, reader.line_num, row, places, cells=cells)
                cells = cells or len(question)
                questions += question
                answers += answer
                ratings.append(rating)
    except (UnicodeDecodeError, csv.Error) as error:
        raise _damaged(file, str(error)) from error
    if not ratings:
        raise _damaged(file, "it holds no puzzles")
    side = round(cells**0.5)
    inputs, targets = (np.frombuffer(part, np.uint8).reshape(-1, cells) for part in (questions, answers))
    table = Table(side, _tokens(inputs), _tokens(targets), np.frombuffer(ratings, np.int64))
    _check(file, table)
    return table


def _row(file: Path, line: int, row: list[str], places: list[int], *, cells: int) -> tuple[bytes, bytes, int]:
    try:
        question, answer, rating = (row[place] for place in places)
        texts = question.encode("ascii"), answer.encode("ascii")
        number = int(np.int64(int(rating)))
    except (IndexError, ValueError, OverflowError) as error:
        raise _damaged(file, f"line {line} is not a puzzle, solution and rating") from error
    lengths = (cells,) if cells else tuple(side * side for side in SIDES)
    if len(question) not in lengths or len(answer) != len(question):
        raise _damaged(file, f"line {line} has {len(question)} and {len(answer)} cells, not {lengths[-1]}")
    return *texts, number


def _tokens(text: Cells) -> Cells:
    """Convert ASCII digits and dots to tokens; other characters become invalid tokens."""
    tokens: Cells = np.where(text == ord("."), BLANK, text - (ord("0") - 1)).astype(np.uint8)
    return tokens


def _check(file: Path, table: Table) -> None:
    """Raise DataError if an answer does not solve its puzzle."""
    side, units = table.side, board_of(table.side).units
    complete = np.arange(BLANK + 1, BLANK + 1 + side, dtype=np.uint8)
    wrong = ((table.inputs != BLANK) & (table.inputs != table.targets)).any(axis=1)
    for unit in units:
        wrong |= (np.sort(table.targets[:, unit], axis=1) != complete).any(axis=1)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise _damaged(file, f"puzzle {row + 1} is not answered by its solution")


def _damaged(file: Path, why: str) -> DataError:
    columns = ",".join(COLUMNS)
    return DataError(f"{file} is not a file of puzzles", why=why, todo=f"its columns are to be {columns}")


PARTS = ("train", "test")
PUZZLES_PER_PROCESS = 100  # at least, of levels that are not easy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/sudoku/Kconfig; None for files. clues: of the easy level only."""

    level: str | None
    clues: int | None
    train_size: int | None
    test_size: int | None

    def requested(self) -> Level:
        """Return the level with the requested number of clues."""
        assert self.level is not None
        return replace(LEVELS[self.level], clues=self.clues or 0)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of training and test puzzles."""
        assert self.train_size is not None and self.test_size is not None
        return self.train_size, self.test_size


def describe(options: Options, location: DataLocation) -> Dataset | None:
    """Return the metadata of generated puzzles; None for files. Raises ConfigError if there are too few."""
    if location.name == "sudoku_csv":
        return None
    check_sizes(options)
    spec = PuzzleSpec(name="sudoku", side=options.requested().side, synthetic=True)
    zeros = (np.broadcast_to(np.uint8(0), (size, *spec.input_shape)) for size in options.sizes)
    train, test = (ArrayPart(rows, rows) for rows in zeros)
    source = f"sudoku: as it is generated, {train.size} + {test.size} puzzles of level {options.level}"
    return Dataset(spec, train, test, source)


def open_set(options: Options, location: DataLocation) -> Dataset:
    """Open generated puzzles or those of files. Raises what `open_sudoku` and `open_csv` do."""
    if location.name == "sudoku_csv":
        return open_csv(location.files)
    return open_sudoku(options, cache_dir=location.cache_dir, log=location.log)


def open_sudoku(options: Options, *, cache_dir: Path, log: Callable[[str], None]) -> Dataset:
    """Return puzzles, generated into `cache_dir` once. Raises ConfigError for too many, ToolkitError."""
    check_sizes(options)
    level = options.requested()
    train, test = options.sizes

    def fill(folder: Path) -> None:
        log(f"sudoku: generating {train} + {test} puzzles of level {options.level}")
        for part, size in zip(PARTS, options.sizes, strict=True):
            processes = max(1, min(cpu_count(), size // PUZZLES_PER_PROCESS)) if level.lowest else 1
            rows = puzzles(level, part=part, count=size, processes=processes)
            write_table(folder / f"{part}.csv", rows, source=f"anneal-{VERSION}")

    name = "-".join(map(str, (options.level, options.clues or "", train, test, f"v{VERSION}")))
    # The repr of a former class, so that caches of earlier versions stay valid.
    former = f"level={options.level!r}, clues={options.clues}, train_size={train}, test_size={test}"
    identity = f"{VERSION} SudokuOptions({former})"
    folder = cached_folder(cache_dir / f"sudoku-{name}", identity=identity, fill=fill, log=log)
    tables = [read_table(folder / f"{part}.csv") for part in PARTS]
    source = f"sudoku: {train} + {test} puzzles of level {options.level}, generated ({folder})"
    return _dataset("sudoku", tables, source, synthetic=True)


def check_sizes(options: Options) -> None:
    """Raise ConfigError if there are too few puzzles of 4x4."""
    for part, size in zip(PARTS, options.sizes, strict=True):
        limit = max_puzzles(options.requested(), part=part)
        if limit is not None and size > limit:
            name = f"CONFIG_SUDOKU_{part.upper()}_SIZE={size}"
            raise ConfigError(f"{name} is too many puzzles of level {options.level}", todo=f"at most {limit}")


def open_csv(data_dir: Path) -> Dataset:
    """Open train.csv and test.csv. Raises DataError if one is damaged, or they share a solution."""
    instead = "generate puzzles (CONFIG_DATASET_SUDOKU=y)"
    why = "it holds the puzzles of sudoku-extreme, or others in its columns"
    files = [find_file(data_dir, "sudoku_csv", [f"{part}.csv"], why=why, instead=instead) for part in PARTS]
    tables = [read_table(file) for file in files]
    if tables[0].side != tables[1].side:
        what = f"{files[0]} and {files[1]} have puzzles of different sizes"
        raise DataError(what, todo="keep those of one size in both")
    if shared := len(_solutions(tables[0]) & _solutions(tables[1])):
        why = "a test would prove nothing"
        what = f"{files[0]} and {files[1]} share {shared} solutions"
        raise DataError(what, why=why, todo="remove their puzzles from one of the files")
    sizes = " + ".join(str(len(table.ratings)) for table in tables)
    source = f"sudoku_csv: {sizes} puzzles from {files[0].parent}"
    return _dataset("sudoku_csv", tables, source, synthetic=False)


def _dataset(name: str, tables: list[Table], source: str, *, synthetic: bool) -> Dataset:
    train, test = (ArrayPart(table.inputs, table.targets) for table in tables)
    spec = PuzzleSpec(name=name, side=tables[0].side, synthetic=synthetic)
    return Dataset(spec, train, test, source)


def _solutions(table: Table) -> set[bytes]:
    return {row.tobytes() for row in np.unique(table.targets, axis=0)}
