"""The lint of static graphs: what is one graph passes, and each way not to be one is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lib.nn.graph_lint import lint


class Step:
    """A small training step that some tests spoil."""

    def __init__(self, spoil: Callable[[torch.Tensor, int], object] = lambda _x, _step: None) -> None:
        torch.manual_seed(0)
        self.model, self.spoil = nn.Linear(4, 4), spoil
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def __call__(self, step: int) -> None:
        x = torch.full((3, 4), 0.5)
        loss = self.model(x).square().sum()
        self.spoil(loss.detach() + x, step)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_plain_step_is_one_graph() -> None:
    report = lint(Step())
    assert report.is_static and (report.graphs, report.constants, report.steps) == (1, 1, 3)
    assert report.operations > 5
    (line,) = report.lines()
    assert line == f"one graph of {report.operations} operations in 3 steps"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda x, _: x.sum().item(), "_local_scalar_dense asks the host"),
        (lambda x, _: bool(x.sum() > 0), "_local_scalar_dense asks the host"),
        (lambda x, _: torch.allclose(x, x), "allclose asks the host"),
        (lambda x, _: x.sum().tolist(), "tolist asks the host"),
        (lambda x, _: x.cpu(), "cpu asks the host"),
        (lambda x, _: str(x), "__repr__ asks the host"),
        (
            lambda x, _: x.repeat_interleave(x[:, 0].long(), dim=0),
            "repeat_interleave has a shape that numbers decide",
        ),
        (lambda x, _: x[x > 0], "index has a shape that numbers decide"),
        (lambda x, _: x.nonzero(), "nonzero has a shape that numbers decide"),
        (lambda x, _: x.unique(), "_unique2 has a shape that numbers decide"),
        (lambda x, _: torch.masked_select(x, x > 0), "masked_select has a shape that numbers decide"),
    ],
)
def test_what_asks_the_host_or_has_a_shape_of_numbers_is_told(
    spoil: Callable[[torch.Tensor, int], object], told: str
) -> None:
    report = lint(Step(spoil))
    assert not report.is_static and report.faults[told] == 3
    assert f"{told}, 3 times" in list(report.lines())


def test_a_shape_that_grows_is_another_graph_each_step() -> None:
    report = lint(Step(lambda x, step: x.repeat(step + 1, 1)))
    assert not report.is_static and report.graphs == 3 and not report.faults


def test_an_operation_that_comes_later_is_another_graph() -> None:
    report = lint(Step(lambda x, step: x.exp() if step == 3 else x))
    assert report.graphs == 2
    assert lint(Step(lambda x, step: x.exp() if step == 0 else x)).is_static, "the first may set things up"


def test_a_rate_that_is_a_number_of_python_is_told_but_no_fault() -> None:
    report = lint(Step(lambda x, step: x * (0.1 * step)))
    assert report.is_static and (report.graphs, report.constants) == (1, 3)
    assert "3 if numbers of Python count" in list(report.lines())[-1]
    rate = torch.zeros(())
    in_a_tensor = Step(lambda x, _: x * rate.add_(0.1))
    assert lint(in_a_tensor).constants == 1


def test_integer_indices_are_no_masks_and_a_number_of_repeats_is_a_size() -> None:
    assert lint(Step(lambda x, _: x[torch.tensor([0, 2])])).is_static
    assert lint(Step(lambda x, _: x.repeat_interleave(2, dim=0))).is_static
