"""The puzzle that a recursive model shows: the one that takes it longest, and each step that changes it."""

from __future__ import annotations

import pytest
import torch

from tests.models.trm.puzzles import puzzle_data, small_trm_config
from tests.support.training import small_job, small_plan
from train.tasks.recursive.exhibits import answers, exhibits, longest


def test_the_longest_is_the_one_that_is_solved_last() -> None:
    targets_BL = torch.zeros(3, 2)
    wrong, right = [1, 0], [0, 0]
    steps = [[right, wrong, wrong], [wrong, wrong, right], [right, wrong, right], [right, wrong, right]]
    assert longest(torch.tensor(steps), targets_BL) == (0, 3), "it was wrong again after step 2"
    assert longest(torch.tensor(steps)[:1], targets_BL) == (0, 1)
    never = torch.tensor([[[1, 1], [1, 0]]])
    assert longest(never, torch.zeros(2, 2)) == (1, 0), "none is solved: the one with most right cells"


@pytest.mark.slow
def test_boards_are_the_steps_of_the_evaluation() -> None:
    config = small_trm_config(eval_steps=3)
    data = puzzle_data(config)
    job = small_job(config, small_plan(4), data, dtype=torch.float32)
    with job.train_loader, job.eval_loader:
        (made,) = exhibits(job, data.dataset, iter(()))
        batch = next(job.eval_loader.batches(rank=0, world=1, batch_size=4))
        answers_SBL = answers(job, batch.inputs, steps=3)
    assert made["kind"] == "boards" and answers_SBL.shape == (3, 4, 16)
    place, _ = longest(answers_SBL, batch.targets)
    puzzle, *after = ([cell for row in board["rows"] for cell in row] for board in made["boards"])
    given = [token - 1 if token > 1 else "" for token in batch.inputs[place].tolist()]
    assert [cell for cell, _ in puzzle] == [str(digit) for digit in given]
    assert {mark for _, mark in puzzle} == {"given", "empty"}
    assert 1 <= len(after) <= 3
    last, target = answers_SBL[-1, place].tolist(), batch.targets[place].tolist()
    for token, wanted, (cell, mark), digit in zip(last, target, after[-1], given, strict=True):
        assert cell == (str(token - 1) if token > 1 else "")
        expected = "right" if token == wanted else "wrong" if token > 1 else "empty"
        assert mark == ("given" if digit else expected)
