"""Puzzles: each has one solution by a solver of another kind, and no solution is on both sides."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from lib.data import LoaderConfig, TrainLoader
from lib.data.augment import apply_symmetry, draw
from lib.data.datasets.sudoku.data import COLUMNS, read_table, write_table
from lib.data.datasets.sudoku.generator import LEVELS, VERSION, Puzzle, puzzles
from lib.data.datasets.sudoku.solver import (
    all_grids,
    board_of,
    places_of,
    prove,
    random_grid,
    unavoidable_set,
)
from lib.data.datasets.sudoku.spec import PuzzleSpec
from lib.data.sampler import restrict
from lib.data.store import Placement
from lib.data.types import ArrayPart
from lib.errors import ConfigError, DataError
from tests.models.trm.puzzles import part_of, small_puzzles, small_trm_config, solutions
from tests.support.datasets import FROM_FILES, looked, opened
from tests.support.work import calls
from train.training_data import describe_training_data

# Golay's puzzle with 17 clues, and one that has two solutions.
SEVENTEEN = "000000010400000000020000000000050407008000300001090000300400200050100000000806000"


def digits(text: str) -> tuple[int, ...]:
    return tuple(map(int, text))


def test_the_boards() -> None:
    for side, peers in ((4, 7), (9, 20)):
        board = board_of(side)
        assert board.cells == side * side and len(board.units) == 3 * side
        assert {len(others) for others in board.peers} == {peers}
        assert all(sorted(unit) == sorted(set(unit)) and len(unit) == side for unit in board.units)


def test_there_are_288_boards_of_4x4() -> None:
    grids = all_grids(board_of(4))
    assert len(set(grids)) == 288
    assert all(solutions(grid) == [grid] for grid in grids[::50])


def test_the_solver_agrees_with_one_of_another_kind() -> None:
    random = Random(0)
    board = board_of(9)
    proof = prove(board, digits(SEVENTEEN))
    assert (proof.solutions, proof.solution) == (1, solutions(digits(SEVENTEEN))[0])
    counted = set()
    for clues in (24, 28, 32, 40, 60):
        grid = random_grid(board, random)
        kept = set(random.sample(range(81), clues))
        puzzle = tuple(digit if cell in kept else 0 for cell, digit in enumerate(grid))
        counted.add(prove(board, puzzle).solutions)
        assert prove(board, puzzle).solutions == len(solutions(puzzle))
    assert counted == {1, 2}
    impossible = (5, 5) + (0,) * 79
    assert (prove(board, impossible).solutions, solutions(impossible)) == (0, [])


@pytest.mark.slow
def test_another_solution_is_found_if_there_is_one() -> None:
    board, random, seen = board_of(4), Random(1), set()
    for _ in range(60):
        grid = all_grids(board)[random.randrange(288)]
        puzzle = [digit if random.random() < 0.4 else 0 for digit in grid]
        cell = random.randrange(16)
        puzzle[cell] = 0
        others = [
            digit
            for digit in range(1, 5)
            if digit != grid[cell] and solutions([*puzzle[:cell], digit, *puzzle[cell + 1 :]])
        ]
        kept = sum(1 << clue for clue, digit in enumerate(puzzle) if digit)
        found = unavoidable_set(board, places_of(board, grid), kept, cell)
        assert bool(found) == bool(others)
        if found:
            around = [0 if found >> place & 1 else digit for place, digit in enumerate(grid)]
            assert found >> cell & 1 and not found & kept and len(solutions(around)) == 2
        seen.add(bool(others))
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("name", "clues", "count", "digest"),
    [
        ("4x4", 0, 40, "3ca7c8b9568b5d4e"),
        ("easy", 60, 5, "2f738d851fbdaa42"),
        ("medium", 0, 2, "1d1e5718ec348403"),
        ("hard", 0, 2, "77e8eee9ef745604"),
        ("extreme", 0, 1, "1a7482fae25b4bfa"),
    ],
)
def test_every_puzzle_has_one_solution_and_the_rating_of_its_level(
    name: str, clues: int, count: int, digest: str
) -> None:
    """digest: of version 1 of the generator; other puzzles are to be another version."""
    level = replace(LEVELS[name], clues=clues)
    found = list(puzzles(level, part="train", count=count))
    rows = [f"{''.join(map(str, row.question + row.answer))} {row.rating}" for row in found]
    assert (VERSION, hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]) == (1, digest)
    for puzzle in found:
        assert solutions(puzzle.question) == [puzzle.answer]
        assert level.lowest <= puzzle.rating <= level.highest
        assert prove(board_of(level.side), puzzle.question).backtracks == puzzle.rating
        for cell, clue in enumerate(puzzle.question):  # none can be left out
            if clue and name == "4x4":
                fewer = (*puzzle.question[:cell], 0, *puzzle.question[cell + 1 :])
                assert len(solutions(fewer)) > 1


def test_puzzles_are_functions_of_their_number() -> None:
    assert small_puzzles("train", 12)[:5] == small_puzzles("train", 5)
    assert small_puzzles("train", 5) != small_puzzles("test", 5)


@pytest.mark.slow
def test_no_solution_is_on_both_sides(tmp_path: Path) -> None:
    options = {"level": "4x4", "clues": None, "train_size": 400, "test_size": 100}
    dataset = opened("sudoku", options, cache_dir=tmp_path)
    assert isinstance(dataset.train, ArrayPart) and isinstance(dataset.test, ArrayPart)
    assert (dataset.train.size, dataset.test.size) == (400, 100)
    sides = [{row.tobytes() for row in part.take()[1]} for part in (dataset.train, dataset.test)]
    assert not sides[0] & sides[1] and len(sides[0]) > 150 and len(sides[1]) > 40
    assert len(np.unique(dataset.train.inputs, axis=0)) == 400
    with pytest.raises(ConfigError, match=r"holds out puzzles with .* solutions that are trained on"):
        restrict(dataset, holdout=50)
    with pytest.raises(ConfigError, match=r"SUDOKU_TEST_SIZE=5000 is too many .*at most 2900"):
        opened("sudoku", options | {"test_size": 5000}, cache_dir=tmp_path)


def test_a_file_in_the_layout_of_sudoku_extreme(tmp_path: Path) -> None:
    file = tmp_path / "train.csv"
    answer = "".join(map(str, solutions(digits(SEVENTEEN))[0]))
    file.write_text(
        f"source,question,answer,rating\npuzzles0_kaggle,{SEVENTEEN.replace('0', '.')},{answer},7\n"
    )
    table = read_table(file)
    assert (table.side, table.ratings.tolist()) == (9, [7])
    assert table.inputs[0].tolist() == [digit + 1 for digit in digits(SEVENTEEN)]
    assert table.targets[0].tolist() == [digit + 1 for digit in digits(answer)]
    exported = f"question,answer,rating\r\n{SEVENTEEN},{answer},7\r\n".encode("utf-8-sig")
    file.write_bytes(exported)
    assert np.array_equal(read_table(file).inputs, table.inputs), "as spreadsheets save it"
    rows = small_puzzles("train", 20)
    write_table(file, rows, source="here")
    assert file.read_text().splitlines()[0] == ",".join(COLUMNS)
    table, part = read_table(file), part_of(rows)
    assert np.array_equal(table.inputs, part.inputs) and np.array_equal(table.targets, part.targets)
    assert table.ratings.tolist() == [row.rating for row in rows]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("question", "quiz", "lacks the column question"),
        (",0\n", ",hard\n", "line 2 is not a puzzle"),
        (",0\n", f",{2**63}\n", "line 2 is not a puzzle"),
        (",0\n", "\n", "line 2 is not a puzzle"),
        ("here,", "here,.", "line 2 has 17 and 16 cells"),
        ("here,", "here,.\n", "line 2"),
    ],
)
def test_damaged_files_are_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    file = tmp_path / "train.csv"
    write_table(
        file, [Puzzle(row.question, row.answer, 0) for row in small_puzzles("train", 1)], source="here"
    )
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(DataError, match=told):
        read_table(file)


def test_answers_that_are_no_solutions_are_told(tmp_path: Path) -> None:
    first, second = small_puzzles("train", 2)
    file = tmp_path / "train.csv"
    swapped = list(second.answer)
    swapped[0], swapped[1] = swapped[1], swapped[0]
    for answer in (tuple(swapped), first.answer):
        write_table(file, [first, Puzzle(second.question, answer, 0)], source="here")
        with pytest.raises(DataError, match="puzzle 2 is not answered by its solution"):
            read_table(file)
    (tmp_path / "test.csv").write_text("")
    write_table(file, [first], source="here")
    with pytest.raises(DataError, match="lacks the column"):
        opened("sudoku_csv", FROM_FILES, data_dir=tmp_path)
    write_table(tmp_path / "test.csv", [first], source="here")
    with pytest.raises(DataError, match="share 1 solutions"):
        opened("sudoku_csv", FROM_FILES, data_dir=tmp_path)
    write_table(tmp_path / "test.csv", small_puzzles("test", 1), source="here")
    found = opened("sudoku_csv", FROM_FILES, data_dir=tmp_path)
    assert (found.train.size, found.test.size) == (1, 1)
    (tmp_path / "test.csv").unlink()
    with pytest.raises(DataError, match=r"no test\.csv"):
        opened("sudoku_csv", FROM_FILES, data_dir=tmp_path)


@pytest.fixture(scope="module")
def many() -> tuple[torch.Tensor, torch.Tensor]:
    """One puzzle and its solution, changed in 4000 ways."""
    answer = random_grid(board_of(9), Random(3))
    question = [digit if cell % 3 else 0 for cell, digit in enumerate(answer)]
    inputs, targets = (
        torch.tensor([digit + 1 for digit in row], dtype=torch.uint8).expand(4000, -1)
        for row in (question, answer)
    )
    numbers = np.arange(4000)
    (hashes,) = draw(numbers * 0, numbers, kind="symmetries", pad=0, seed=1)
    return EASY.transformed(inputs, targets, torch.from_numpy(hashes))


def test_a_transformed_solution_is_one(many: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, targets = many
    complete = torch.arange(2, 11)
    for unit in board_of(9).units:
        assert (targets[:, unit].sort(dim=1).values == complete).all()
    blank = inputs == 1
    assert (blank.sum(dim=1) == 27).all() and torch.equal(inputs[~blank], targets[~blank])
    assert inputs.dtype == targets.dtype == torch.int64


def test_every_kind_of_symmetry_occurs(many: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, targets = many
    assert len(targets.unique(dim=0)) == 4000
    blank = (inputs == 1).view(-1, 9, 9)
    # Every third cell is empty, so whole columns are: rows of the boards that are transposed.
    turned = blank.all(dim=2).any(dim=1)
    assert 0.45 < turned.float().mean() < 0.55
    first = targets[:, 0]
    assert all(0.08 < (first == digit).float().mean() < 0.15 for digit in range(2, 11))
    places = blank[~turned].all(dim=1).float().mean(dim=0)  # of the empty columns
    assert ((places > 0.29) & (places < 0.38)).all()


@pytest.mark.slow
def test_fixed_symmetries_are_those_of_the_original(many: tuple[torch.Tensor, torch.Tensor]) -> None:
    inputs, targets = (part[:40] for part in many)
    fixed, epochs = 5, 300
    seen: list[set[bytes]] = [set() for _ in range(40)]
    original = 0
    for epoch in range(epochs):
        draws = draw(
            torch.full((40,), epoch), torch.arange(40), kind="symmetries", pad=0, seed=1, fixed=fixed
        )
        boards = apply_symmetry(inputs, targets, draws, spec=EASY)
        for number in range(40):
            seen[number].add(boards[0][number].numpy().tobytes() + boards[1][number].numpy().tobytes())
        same = (boards[0] == inputs).all(dim=1) & (boards[1] == targets).all(dim=1)
        assert torch.equal(same, draws[1] == 0)
        original += int(same.sum())
    assert {len(boards) for boards in seen} == {fixed + 1}
    assert 1 / 8 < original / (40 * epochs) < 1 / 4.5, "one in six"
    one, other = (
        draw(np.array([9]), np.array([3]), kind="symmetries", pad=0, seed=s, fixed=5) for s in (1, 2)
    )
    assert one[0] != other[0], "a function of the seed"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 6])
def test_a_loader_takes_fixed_symmetries_of_its_own(ahead: int) -> None:
    table = part_of([next(puzzles(LEVELS["easy"], part="train", count=1))])
    loader = TrainLoader(
        table, EASY, DELIVERY, seed=1, augment="symmetries", pad=0, fixed=1, epochs_ahead=ahead
    )
    boards = []
    with loader:
        for step in range(6):
            (batch,) = loader.micro_batches(step=step, target=1, sizes=(1,))
            boards.append(batch.inputs[0].tolist())
    expected = draw(np.arange(6), np.zeros(6, np.int64), kind="symmetries", pad=0, seed=1, fixed=1)
    same = [board == table.inputs[0].tolist() for board in boards]
    assert same == [not chosen for chosen in expected[1]] and len(set(same)) == 2


EASY = PuzzleSpec(name="sudoku", side=9, synthetic=True)
DELIVERY = LoaderConfig(
    device=torch.device("cpu"),
    dtype=torch.float32,
    channels_last=False,
    placement="resident",
    num_workers=1,
    prefetch=1,
)


def test_augmentation_is_a_function_of_the_sample_and_not_of_the_batch() -> None:
    rows = part_of(list(puzzles(LEVELS["easy"], part="train", count=2)) * 8)

    def batches(sizes: tuple[int, ...], step: int) -> torch.Tensor:
        with TrainLoader(rows, EASY, DELIVERY, seed=1, augment="symmetries", pad=0) as loader:
            found = loader.micro_batches(step=step, target=8, sizes=sizes)
            return torch.cat([torch.stack((batch.inputs, batch.targets)) for batch in found], dim=1)

    assert torch.equal(batches((8,), 1), batches((3, 3, 2), 1))
    assert not torch.equal(batches((8,), 0), batches((8,), 2)), "another epoch, another change"


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("rank", [0, 1])
def test_puzzles_that_are_changed_ahead_are_those_of_the_fly(placement: Placement, rank: int) -> None:
    rows = part_of(list(puzzles(LEVELS["easy"], part="train", count=2)) * 8)

    def batches(steps: range, epochs_ahead: int) -> list[torch.Tensor]:
        options = {"seed": 1, "augment": "symmetries", "pad": 0, "epochs_ahead": epochs_ahead}
        with TrainLoader(rows, EASY, replace(DELIVERY, placement=placement), **options) as loader:
            return [
                torch.stack((batch.inputs, batch.targets))
                for step in steps
                for batch in loader.micro_batches(
                    step=step, target=12, firsts=(6 * rank, 6 * rank + 4), sizes=(4, 2)
                )
            ]

    fly = batches(range(4), 0)  # 48 samples: three epochs, in steps that straddle them
    assert all(map(torch.equal, fly, batches(range(4), 3)))
    assert all(map(torch.equal, fly[4:], batches(range(2, 4), 3))), "a run that goes on"
    with pytest.raises(AssertionError, match="beyond the epochs augmented"):
        batches(range(3, 5), 3)


def test_puzzles_are_transformed_many_at_a_time() -> None:
    inputs = torch.ones(768, 81, dtype=torch.uint8)
    hashes = torch.arange(768)
    assert calls(lambda: EASY.transformed(inputs, inputs, hashes)) < 768


def test_more_puzzles_than_there_are_are_refused_by_a_look() -> None:
    many = {"level": "4x4", "clues": None, "train_size": 10**6, "test_size": 1}
    with pytest.raises(ConfigError, match="CONFIG_SUDOKU_TRAIN_SIZE=1000000 is too many"):
        looked("sudoku", many)


@pytest.mark.slow
def test_puzzles_held_out_are_planned(tmp_path: Path) -> None:
    requested = {"level": "easy", "clues": 60, "train_size": 50, "test_size": 5}
    config = small_trm_config(dataset="sudoku", data_dir=None, data_options=requested, holdout=10)
    dataset = describe_training_data(config, root=tmp_path, log=print).dataset
    assert (dataset.train.size, dataset.test.size) == (40, 10)
