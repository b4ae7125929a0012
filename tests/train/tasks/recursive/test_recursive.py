"""Deep supervision: halting, and a carry that belongs to the row and to nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.data.loader import Batch
from lib.memory.live import LiveBytes
from models.trm.model import Thought
from tests.models.trm.puzzles import puzzle_data, small_trm_config
from tests.support.fake_backend import FakeBackend
from tests.support.training import MemoryRecord, Wrapped, largest_difference, small_job, small_plan
from train import loop
from train.job import Job, Progress, evaluation_sums
from train.tasks.base import Forward, Sums, Task
from train.tasks.recursive.task import Carry, Recursive, Rows

EFFECTIVE = 14


class Oracle:
    """A forward pass that is told what to answer."""

    def __init__(self, *, halt: float = -1.0) -> None:
        self.halt, self.calls = halt, list[tuple[Any, ...]]()

    def __call__(self, tokens: Tensor, *state: Tensor) -> Thought:
        self.calls.append((tokens, *state))
        rows = len(tokens)
        logits = torch.nn.functional.one_hot(tokens, 6).double().requires_grad_()
        step = state[0] + 1 if state else torch.zeros(rows, 1, 1)
        return Thought(logits, torch.full((rows,), self.halt), step, step)


def one_step(task: Recursive, forward: Forward, tokens: Tensor, *, step: int) -> Sums:
    task.carry.seek(step=step, first=0, offset=0, count=len(tokens), rows=len(tokens))
    sums = task.training(forward, Batch(tokens, tokens))
    task.carry.commit()
    return sums


def samples(step: int, rows: int = 3) -> Tensor:
    return torch.full((rows, 16), 2) + step % 4


def test_a_sample_stays_for_its_steps_and_the_next_one_takes_its_place() -> None:
    task, oracle = Recursive(seed=0, max_steps=3, exploration=0.0, eval_steps=1), Oracle()
    sums = [one_step(task, oracle, samples(step), step=step) for step in range(7)]
    seen = [int(call[0][0, 0]) for call in oracle.calls]
    assert seen == [2, 2, 2, 5, 5, 5, 4], "of the samples 0 to 6 those of 0, 3 and 6 are used"
    assert [call[3].tolist() for call in oracle.calls[1:5]] == [
        [False] * 3,
        [False] * 3,
        [True] * 3,
        [False] * 3,
    ]
    assert [int(part.metrics["halted"]) for part in sums] == [0, 0, 3, 0, 0, 3, 0]
    assert [int(part.metrics["solved"]) for part in sums] == [0, 0, 3, 0, 0, 3, 0]
    assert all(part.count == 3 for part in sums)


def test_a_sample_that_the_model_takes_for_solved_makes_room() -> None:
    task, oracle = Recursive(seed=0, max_steps=16, exploration=0.0, eval_steps=1), Oracle(halt=1.0)
    for step in range(3):
        one_step(task, oracle, samples(step), step=step)
    assert [int(call[0][0, 0]) for call in oracle.calls] == [2, 3, 4]


def test_with_one_step_the_logit_does_not_matter_and_nothing_stays() -> None:
    task, oracle = Recursive(seed=0, max_steps=1, exploration=1.0, eval_steps=1), Oracle()
    for step in range(3):
        one_step(task, oracle, samples(step), step=step)
    assert [int(call[0][0, 0]) for call in oracle.calls] == [2, 3, 4]


def test_exploration_gives_some_samples_more_steps() -> None:
    task, oracle = Recursive(seed=0, max_steps=4, exploration=1.0, eval_steps=1), Oracle(halt=1.0)
    halted = [one_step(task, oracle, samples(step, 3000), step=step).metrics["halted"] for step in range(4)]
    # A first step halts none (2 to 4 are wanted); of the rest a third, two thirds and all of what is left.
    assert int(halted[0]) == 0
    assert int(halted[1]) / 3000 == pytest.approx(1 / 3, abs=0.04)


def test_exploration_is_a_function_of_seed_step_and_row() -> None:
    def drawn(*, step: int, first: int, count: int, seed: int = 1) -> list[int]:
        carry = Carry()
        carry.seek(step=step, first=first, offset=0, count=count, rows=count)
        found: list[int] = carry.min_steps(seed=seed, limit=16, probability=0.1).tolist()
        return found

    whole = drawn(step=5, first=0, count=2000)
    assert whole[700:1500] == drawn(step=5, first=700, count=800)
    assert whole != drawn(step=6, first=0, count=2000) and whole != drawn(step=5, first=0, count=2000, seed=2)
    explored = [steps for steps in whole if steps]
    assert len(explored) / 2000 == pytest.approx(0.1, abs=0.03)
    assert set(explored) == set(range(2, 17))


def test_the_loss_is_the_mean_over_cells_and_half_of_the_halting_loss() -> None:
    task = Recursive(seed=0, max_steps=4, exploration=0.0, eval_steps=1)
    tokens = samples(0, 2)
    task.carry.seek(step=0, first=0, offset=0, count=2, rows=2)
    targets = tokens.clone()
    targets[1, :8] = 3  # wrong in half of the cells
    targets[1, 8:] = -100
    sums = task.training(Oracle(halt=-5.0), Batch(tokens, targets))
    right, wrong = torch.tensor(7 / 2).log(), torch.tensor(7.0).log()  # of s(1) = 2, s(0) = 1 five times
    halting = torch.tensor([5.0, -5.0]).exp().log1p()
    assert sums.loss.item() == pytest.approx(float(right + wrong + 0.5 * halting.sum()), rel=1e-6)
    assert float(sums.metrics["accuracy"]) == 1.0, "all of one row, none of what counts of the other"


def test_evaluation_makes_all_steps_and_counts_by_weight() -> None:
    task, oracle = Recursive(seed=0, max_steps=2, exploration=0.0, eval_steps=6), Oracle(halt=1.0)
    tokens = samples(0, 3)
    with torch.no_grad():
        sums = task.evaluation(oracle, Batch(tokens, tokens, torch.tensor([1.0, 1.0, 0.0])))
    assert len(oracle.calls) == 6 and float(sums.count) == 2
    means = {name: float(value) / 2 for name, value in sums.metrics.items()}
    report = task.report({"count": 2.0, "loss": float(sums.loss) / 2} | means)
    assert list(report) == [
        *("samples", "loss", "accuracy", "exact_accuracy"),
        *("exact_after_1", "exact_after_2", "exact_after_4", "exact_after_6"),
    ]
    assert report["exact_accuracy"] == task.score(report) == 1.0
    assert task.carry.selected() is None, "evaluation leaves nothing"


@pytest.mark.slow
def test_from_its_second_step_on_evaluation_takes_no_more_memory() -> None:
    """A plan goes through two of them, however many there will be."""

    def peak(steps: int) -> int:
        job, live = job_of(14, eval_steps=steps), LiveBytes()
        with live:
            next(iter(evaluation_sums(job)))
        return live.trace().peak_bytes

    one, two, many = peak(1), peak(2), peak(6)
    assert one < two <= many < two + 100, "a sum is kept of some steps"


def job_of(
    *cuts: int,
    world: int = 1,
    rank: int = 0,
    task: Callable[[Task], Task] = lambda task: task,
    **changes: Any,
) -> Job:
    settings = {"max_steps": 6, "halt_max_steps": 3, "halt_exploration": 0.5, "learning_rate": 0.3} | changes
    config = small_trm_config(**settings)
    backend = FakeBackend(rank=rank, world=world)
    return small_job(config, small_plan(*cuts, world=world), puzzle_data(config), task=task, backend=backend)


def weights_after(*cuts: int, steps: int = 5, **changes: Any) -> dict[str, Tensor]:
    job = job_of(*cuts, **changes)
    for step in range(steps):
        loop.optimizer_step(job, Progress(step=step))
    return job.model.state_dict()


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    return weights_after(EFFECTIVE)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(7, 7), (5, 5, 4), (4, 4, 4, 2), (3, 3, 3, 3, 2)])
def test_accumulation_changes_nothing(cuts: tuple[int, ...], whole: dict[str, Tensor]) -> None:
    assert largest_difference(weights_after(*cuts), whole) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(7,), (4, 3)])
def test_two_ranks_are_one(cuts: tuple[int, ...], whole: dict[str, Tensor]) -> None:
    """Each in its place, with their gradients averaged by hand."""
    jobs = [job_of(*cuts, world=2, rank=rank) for rank in range(2)]
    for step in range(5):
        progress = Progress(step=step)
        counts = [sum(part.count for part in loop.accumulate_gradients(job, progress)) for job in jobs]
        for one, other in zip(*(job.model.parameters() for job in jobs), strict=True):
            assert one.grad is not None and other.grad is not None
            one.grad = other.grad = (one.grad + other.grad) / 2
        for job, count in zip(jobs, counts, strict=True):
            loop._update(job, progress, count=count)
    for job in jobs:
        assert largest_difference(job.model.state_dict(), whole) < 1e-12


@pytest.mark.slow
def test_a_carry_that_micro_batches_share_is_found_out(
    whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seek = Carry.seek
    monkeypatch.setattr(Carry, "seek", lambda self, **place: seek(self, **{**place, "offset": 0}))
    assert largest_difference(weights_after(7, 7), whole) > 1e-4


def mean_of_means(pieces: int) -> type[Wrapped]:
    """A task of which every micro-batch counts the same, however many rows it has."""

    class MeanOfMeans(Wrapped):
        def training(self, forward: Forward, batch: Batch) -> Sums:
            sums = super().training(forward, batch)
            share = EFFECTIVE / pieces / len(batch.inputs)
            return Sums(sums.loss * share, sums.count, sums.metrics)

    return MeanOfMeans


@pytest.mark.slow
def test_a_mean_of_means_is_found_out(whole: dict[str, Tensor]) -> None:
    assert largest_difference(weights_after(7, 7, task=mean_of_means(2)), whole) < 1e-12
    assert largest_difference(weights_after(5, 5, 4, task=mean_of_means(3)), whole) > 1e-4


@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_is_made_again_from_its_beginning(whole: dict[str, Tensor]) -> None:
    class Fails(Wrapped):
        calls = 0

        def training(self, forward: Forward, batch: Batch) -> Sums:
            Fails.calls += 1
            if Fails.calls == 4:  # the second half of the second step
                raise torch.OutOfMemoryError("not enough")
            return super().training(forward, batch)

    assert largest_difference(weights_after(7, 7, task=Fails, oom_retry=True), whole) < 1e-12


def resumed(state: dict[str, Any]) -> dict[str, Tensor]:
    job = job_of(7, 7, seed=1)
    progress = loop.load_state_dict(job, state)
    for step in range(progress.step, 6):
        loop.optimizer_step(job, Progress(step=step))
    return job.model.state_dict()


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit_and_only_with_its_carry() -> None:
    record = MemoryRecord()
    job = job_of(7, 7, seed=1, max_steps=4)
    job.record = record
    loop.train(job, Progress())
    state = record.states[4]
    straight = weights_after(7, 7, steps=6, seed=1, max_steps=6)
    again = resumed(dict(state))
    assert all(torch.equal(again[name], straight[name]) for name in straight)
    without = resumed(dict(state) | {"carry": None})
    assert largest_difference(without, straight) > 1e-4


def test_a_carry_is_gathered_from_all_ranks_and_handed_out_again() -> None:
    class Two(FakeBackend):
        """Rank 0, to which the other one sends the negative of what it has."""

        def gather(self, tensor: Tensor) -> list[Tensor]:
            if not tensor.dim():  # the number of rows
                return [tensor, tensor]
            return [tensor, ~tensor if tensor.dtype == torch.bool else -tensor]

    carry, numbers = Carry(), torch.arange(1.0, 7.0).view(2, 3, 1)
    carry.seek(step=0, first=0, offset=0, count=2, rows=2)
    carry.store(Rows(numbers, numbers, numbers[:, 0, 0].long(), numbers[:, 0, 0] > 2, *[numbers.long()] * 2))
    carry.commit()
    state = carry.gathered(Two(rank=0, world=2))
    assert state is not None and {len(part) for part in state.values()} == {4}
    for rank, sign in ((0, 1), (1, -1)):
        other = Carry()
        other.load(state, FakeBackend(rank=rank, world=2), shares=(2, 2))
        other.seek(step=0, first=0, offset=0, count=2, rows=2)
        taken = other.selected()
        assert taken is not None and torch.equal(taken.y_BTD, sign * numbers)
        assert taken.halted_B.tolist() == ([False, True] if rank == 0 else [True, False])
    with pytest.raises(ValueError, match="4 rows of a carry, not 6"):
        Carry().load(state, FakeBackend(rank=0, world=2), shares=(3, 3))
