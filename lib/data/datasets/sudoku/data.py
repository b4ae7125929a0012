"""Open Sudoku: generated once and kept, or from files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lib.data.cache import cached_folder
from lib.data.datasets.files import Place, first_file
from lib.data.datasets.sudoku.generator import LEVELS, VERSION, Level, most_puzzles, puzzles
from lib.data.datasets.sudoku.table import Table, read_table, write_table
from lib.data.types import ArrayPart, Dataset, PuzzleSpec
from lib.devices.probe import cpu_count
from lib.errors import ConfigError, DataError

PARTS = ("train", "test")
WORTH_A_PROCESS = 100  # puzzles that are not easy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The symbols of lib/data/datasets/sudoku/Kconfig: None for puzzles that are in files.

    clues: for the easy level, else None.
    """

    level: str | None
    clues: int | None
    train_size: int | None
    test_size: int | None

    def asked(self) -> Level:
        """The level, with as many clues as are asked for."""
        assert self.level is not None
        return replace(LEVELS[self.level], clues=self.clues or 0)

    @property
    def sizes(self) -> tuple[int, int]:
        """Puzzles to train and to test on."""
        assert self.train_size is not None and self.test_size is not None
        return self.train_size, self.test_size


def outline(options: Options, place: Place) -> Dataset | None:
    """As they will be generated; None for files. Raises ConfigError where there are not so many."""
    if place.name == "sudoku_csv":
        return None
    check_sizes(options)
    level = options.asked()
    spec = PuzzleSpec(name="sudoku", side=level.side, synthetic=True)
    train, test = (
        ArrayPart(rows, rows)
        for size in options.sizes
        for rows in (np.broadcast_to(np.uint8(0), (size, *spec.input_shape)),)
    )
    source = f"sudoku: as it is generated, {train.size} + {test.size} puzzles of level {options.level}"
    return Dataset(spec, train, test, source)


def open_set(options: Options, place: Place) -> Dataset:
    """Generated puzzles, or those of files. Raises what `open_sudoku` and `open_csv` do."""
    if place.name == "sudoku_csv":
        return open_csv(place.files)
    return open_sudoku(options, cache_dir=place.cache_dir, say=place.say)


def open_sudoku(options: Options, *, cache_dir: Path, say: Callable[[str], None]) -> Dataset:
    """Puzzles as `options` has them, generated into `cache_dir` if they are not there.

    Raises ConfigError where there are not so many of 4x4, ToolkitError where the cache cannot be written.
    """
    check_sizes(options)
    level = options.asked()
    train, test = options.sizes
    sizes = {"train": train, "test": test}

    def fill(folder: Path) -> None:
        say(f"sudoku: generating {sizes['train']} + {sizes['test']} puzzles of level {options.level}")
        for part, size in sizes.items():
            processes = max(1, min(cpu_count(), size // WORTH_A_PROCESS)) if level.lowest else 1
            rows = puzzles(level, part=part, count=size, processes=processes)
            write_table(folder / f"{part}.csv", rows, source=f"anneal-{VERSION}")

    name = "-".join(map(str, (options.level, options.clues or "", *sizes.values(), f"v{VERSION}")))
    # As a class of that name was shown that older trees had: what they generated is found again.
    shown = f"level={options.level!r}, clues={options.clues}, train_size={train}, test_size={test}"
    identity = f"{VERSION} SudokuOptions({shown})"
    folder = cached_folder(cache_dir / f"sudoku-{name}", identity=identity, fill=fill, say=say)
    tables = [read_table(folder / f"{part}.csv") for part in PARTS]
    source = f"sudoku: {train} + {test} puzzles of level {options.level}, generated ({folder})"
    return _dataset("sudoku", tables, source, synthetic=True)


def check_sizes(options: Options) -> None:
    """Raise ConfigError where there are not so many puzzles of 4x4."""
    for part, size in zip(PARTS, options.sizes, strict=True):
        most = most_puzzles(options.asked(), part=part)
        if most is not None and size > most:
            name = f"CONFIG_SUDOKU_{part.upper()}_SIZE={size}"
            raise ConfigError(f"{name} is too many puzzles of level {options.level}", todo=f"at most {most}")


def open_csv(data_dir: Path) -> Dataset:
    """train.csv and test.csv from DATA_DIR/sudoku_csv or DATA_DIR.

    Raises DataError where one is missing or damaged, or where they share a solution.
    """
    files = []
    for part in PARTS:
        file = first_file(folder / f"{part}.csv" for folder in (data_dir / "sudoku_csv", data_dir))
        if file is None:
            raise DataError(
                f"there is no {part}.csv in {data_dir / 'sudoku_csv'} or {data_dir}",
                why="it holds the puzzles of sudoku-extreme, or others in its columns",
                todo="put it there, or generate puzzles (CONFIG_DATASET_SUDOKU=y)",
            )
        files.append(file)
    tables = [read_table(file) for file in files]
    if tables[0].side != tables[1].side:
        raise DataError(f"{files[0]} and {files[1]} have puzzles of different sizes")
    if shared := len(_solutions(tables[0]) & _solutions(tables[1])):
        raise DataError(
            f"{files[0]} and {files[1]} share {shared} solutions", why="a test would prove nothing"
        )
    sizes = " + ".join(str(len(table.ratings)) for table in tables)
    return _dataset(
        "sudoku_csv", tables, f"sudoku_csv: {sizes} puzzles from {files[0].parent}", synthetic=False
    )


def _dataset(name: str, tables: list[Table], source: str, *, synthetic: bool) -> Dataset:
    train, test = (ArrayPart(table.inputs, table.targets) for table in tables)
    spec = PuzzleSpec(name=name, side=tables[0].side, synthetic=synthetic)
    return Dataset(spec, train, test, source)


def _solutions(table: Table) -> set[bytes]:
    return {row.tobytes() for row in np.unique(table.targets, axis=0)}
