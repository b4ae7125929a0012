"""Exhibits of a recursive model: one puzzle as the model's answer to it changes from step to step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lib.data.datasets.sudoku.spec import BLANK, PuzzleSpec
from lib.data.types import Dataset
from lib.reports.page import Block
from train.job import Job, evaluated_weights
from train.tasks.recursive.task import thoughts


def exhibits(job: Job, dataset: Dataset, _: Iterator[int]) -> list[Block]:
    """Return the puzzle of the first evaluation batch that takes the model longest to solve."""
    assert isinstance(dataset.spec, PuzzleSpec)
    batch = next(job.eval_loader.batches(rank=0, world=1, batch_size=job.plan.micro_batch))
    answers_SBL = answers(job, batch.inputs, steps=int(str(job.config.task_options["eval_steps"])))
    place, solved_after = longest(answers_SBL, batch.targets)
    puzzle_L, target_L = batch.inputs[place].tolist(), batch.targets[place].tolist()
    boards, before_L = list[Block](), None
    for step, answer_L in enumerate([puzzle_L, *answers_SBL[:, place].tolist()]):
        if answer_L != before_L:
            cells = [*map(_cell, puzzle_L, answer_L, target_L)]
            starts = range(0, len(cells), dataset.spec.side)
            rows = [cells[start : start + dataset.spec.side] for start in starts]
            boards.append({"caption": f"after step {step}" if step else "the puzzle", "rows": rows})
        before_L = answer_L
    end = f"it is solved after step {solved_after}" if solved_after else "it is not solved"
    note = (
        f"Of the first {len(batch.inputs)} puzzles, the one that takes longest: {end} of {len(answers_SBL)}. "
        "Steps that change nothing are left out. Given digits are bold, wrong ones underlined."
    )
    return [{"kind": "boards", "title": "A puzzle, step by step", "note": note, "boards": boards}]


@torch.no_grad()
def answers(job: Job, inputs_BL: Tensor, *, steps: int) -> Tensor:
    """Return the likeliest tokens after each of `steps` supervision steps: (steps, B, L)."""
    with evaluated_weights(job), job.backend.autocast(job.plan.precision):
        return torch.stack([each.logits.argmax(dim=2) for each in thoughts(job.forward, inputs_BL, steps)])


def longest(answers_SBL: Tensor, targets_BL: Tensor) -> tuple[int, int]:
    """Return the sample that stays wrong longest but ends solved, and the step from which on it is solved.

    Where none ends solved: the one with the most right cells, and 0.
    """
    right_SBL = answers_SBL == targets_BL
    solved_SB = right_SBL.all(dim=2)
    if not solved_SB[-1].any():
        return int(right_SBL[-1].sum(dim=1).argmax()), 0
    solved_at_end_B = solved_SB.flip(0).cumprod(dim=0).sum(dim=0)  # the steps since it is solved
    place = int(solved_at_end_B.masked_fill(solved_at_end_B == 0, len(solved_SB) + 1).argmin())
    return place, len(solved_SB) + 1 - int(solved_at_end_B[place])


def _cell(given: int, token: int, target: int) -> tuple[str, str]:
    if token <= BLANK:
        return "", "empty"
    return str(token - BLANK), "given" if given > BLANK else "right" if token == target else "wrong"
