"""Sums of micro-batches until they are read: each sample weighs the same, and no graph is kept alive."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from lib.devices.base import Backend
from lib.errors import ConfigError, ToolkitError
from lib.plan.fitting import plan_of
from tests.support.training import CPU, CPU_TRIAL, random_data, small_config, small_job, small_plan, trained
from train.job import evaluate
from train.planning.memory_estimate import trace_memory
from train.tasks.base import Sums, Totals, no_logits, report_of, score_of


def test_means_are_over_samples_whatever_the_sizes() -> None:
    totals = Totals()
    totals.add(Sums(torch.tensor(6.0), 3, {"accuracy": torch.tensor(3)}))
    totals.add(Sums(torch.tensor(2.0), torch.tensor(1), {"accuracy": torch.tensor(0)}))
    assert totals.means(Backend("cpu")) == {"count": 4, "loss": 2.0, "accuracy": 0.75}


def test_a_long_evaluation_loses_nothing_to_rounding() -> None:
    totals = Totals()
    totals.add(Sums(torch.tensor(2.0**24), 1, {}))
    for _ in range(3):
        totals.add(Sums(torch.tensor(1.0), 1, {}))
    assert totals.means(Backend("cpu")) == pytest.approx({"count": 4, "loss": (2**24 + 3) / 4}, rel=1e-15)


def test_a_count_of_zero_is_no_divergence() -> None:
    totals = Totals()
    totals.add(Sums(torch.tensor(6.0), 0, {}))
    with pytest.raises(ToolkitError, match=r"no target was counted: Sums\.count is 0; count samples"):
        totals.means(Backend("cpu"))


class Holding(torch.autograd.Function):
    """A step of a graph that holds a token."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: object) -> Tensor:
        ctx.token = token
        return value.clone()


def test_what_a_backward_pass_would_need_is_let_go() -> None:
    class Token:
        pass

    token, totals = Token(), Totals()
    kept = weakref.ref(token)
    loss: Tensor = Holding.apply(torch.ones((), requires_grad=True), token)  # type: ignore[no-untyped-call]
    totals.add(Sums(loss, 1, {}))
    del token
    assert kept() is not None, "the graph holds it"
    del loss
    assert kept() is None


@pytest.mark.parametrize(
    ("sums", "fault"),
    [
        (lambda loss_N: loss_N.sum(), "training returns Tensor, not Sums; return"),
        (lambda loss_N: Sums(loss_N, 3, {}), r"the loss is \(\d+,\), not a sum; sum it over the samples"),
        (lambda _: Sums(1.5, 3, {}), "the loss is float, not a sum"),  # type: ignore[arg-type]
        (
            lambda loss_N: Sums(loss_N.sum(), 3, {"a": 0.5}),
            "training returns metrics of float; return a dict",
        ),  # type: ignore[dict-item]
        (lambda loss_N: Sums(loss_N.sum(), 3, [loss_N]), "training returns metrics of list; return a dict"),  # type: ignore[arg-type]
        (lambda loss_N: Sums(loss_N.sum(), 3, loss_N), "training returns metrics of Tensor; return a dict"),  # type: ignore[arg-type]
        (lambda loss_N: Sums(loss_N.sum().detach(), 3, {}), "the loss has no gradient: it was detached"),
        (lambda loss_N: Sums(loss_N.sum(), None, {}), "the count is NoneType, not a number"),  # type: ignore[arg-type]
        (lambda loss_N: Sums(loss_N.sum(), 8.0, {}), "the count is float, not a number"),  # type: ignore[arg-type]
        (lambda loss_N: Sums(loss_N.sum(), loss_N, {}), r"the count is \(8,\), not a number of targets"),
        (
            lambda loss_N: Sums(loss_N.sum(), 7 * len(loss_N), {}),
            "training counts 56 targets of a micro-batch that has 8: .* set targets_per_sample",
        ),
        *(
            (lambda loss_N, name=name: Sums(loss_N.sum(), 8, {name: loss_N.sum()}), f"training .* {name}:")
            for name in ("loss", "count", "step", "learning_rate", "peak_memory_bytes")
        ),
    ],
)
def test_what_a_task_should_not_return_is_one_line(sums: Any, fault: str, monkeypatch: Any) -> None:
    """Before a run exists, by the trace, and in a run whose batch was given."""

    def training(_: Any, forward: Any, batch: Any) -> Any:
        return sums(forward(batch.inputs).float().square().sum(dim=1))

    config = small_config("lenet5")
    data = random_data(config, shape=(1, 28, 28), train_size=16)
    job = small_job(config, small_plan(8), data)
    monkeypatch.setattr(type(job.task), "training", training)
    with pytest.raises(ConfigError, match=f"^train/tasks/classify/task.py: {fault}"):
        trained(job)
    with pytest.raises(ConfigError, match=f"^train/tasks/classify/task.py: {fault}"):
        trace_memory(config, plan_of(CPU_TRIAL), data, hardware=CPU)


@pytest.mark.parametrize(
    ("function", "returned", "fault"),
    [
        ("evaluation", None, "evaluation returns NoneType, not Sums; return Sums"),
        ("evaluation", torch.ones(()), "evaluation returns Tensor, not Sums"),
        ("evaluation", Sums(torch.ones(()), 1, {"a": 1}), "evaluation returns metrics of int; return"),  # type: ignore[dict-item]
        ("evaluation", Sums(torch.ones(()), 1, torch.ones(())), "evaluation returns metrics of Tensor;"),  # type: ignore[arg-type]
        ("evaluation", Sums(torch.ones(()), None, {}), "the count is NoneType, not a number"),  # type: ignore[arg-type]
        ("evaluation", Sums(torch.ones(()), 8, {}), "evaluation counts 8 targets by an int: the rows of pad"),
        ("report", {}, "report returns nothing in place of a count; begin with the count"),
        ("report", {"accuracy": 0.98, "loss": 1.0}, "report returns accuracy 0.98 in place of a count"),
        ("report", {"samples": 1.0, "seconds": 1.0}, "report returns a metric seconds: every run"),
        ("report", None, "report returns NoneType, not a dict of numbers"),
        ("report", {"loss": torch.ones(())}, "report returns Tensor, not a dict of numbers"),
        ("report", [1.0], "report returns list, not a dict of numbers"),
    ],
)
def test_what_an_evaluation_should_not_return_is_one_line(
    function: str, returned: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("lenet5")
    job = small_job(config, small_plan(8), random_data(config, shape=(1, 28, 28), train_size=16))
    monkeypatch.setattr(type(job.task), function, lambda *_: returned)
    with pytest.raises(ConfigError, match=f"^train/tasks/classify/task.py: {fault}"):
        evaluate(job)


@pytest.mark.parametrize(
    ("metric", "score", "told"),
    [
        ("recall", 1.0, "report returns no recall, which CONFIG_BEST_METRIC names: it returns loss, error"),
        ("", None, "score returns NoneType, not a number"),
        ("", torch.ones(()), "score returns Tensor, not a number"),
    ],
)
def test_figures_without_a_score_are_told(metric: str, score: Any, told: str) -> None:
    config, task = small_config("lenet5", best_metric=metric), Mock(**{"score.return_value": score})
    with pytest.raises(ConfigError, match=f"^train/tasks/classify/task.py: {told}$"):
        score_of(task, {"loss": 2.0, "error": 0.5}, config)


def test_a_figure_that_the_score_needs_is_named() -> None:
    task = Mock(**{"score.side_effect": lambda figures: figures["accuracy"]})
    told = "report returns no accuracy, which its score needs: it returns samples, loss"
    with pytest.raises(ConfigError, match=f"^train/tasks/classify/task.py: {told}$"):
        score_of(task, {"samples": 3.0, "loss": 2.0}, small_config("lenet5"))


def test_an_error_of_its_own_in_a_score_is_not_one_of_the_report() -> None:
    task = Mock(**{"score.side_effect": lambda _: {}["of its own"]})
    with pytest.raises(KeyError, match="of its own"):
        score_of(task, {"samples": 3.0}, small_config("lenet5"))


def test_figures_of_rows_are_checked_and_added() -> None:
    config, task = small_config("lenet5"), Mock(**{"report.return_value": {"loss": 2.0}})
    task.row_figures.side_effect = [{"roc_auc": 0.5}, [0.5]]
    totals = Mock(**{"rows.return_value": (torch.ones(1), torch.ones(1))})
    assert report_of(task, totals, Backend("cpu"), config) == {"loss": 2.0, "roc_auc": 0.5}
    with pytest.raises(ConfigError, match="row_figures returns list, not a dict of numbers"):
        report_of(task, totals, Backend("cpu"), config)


def test_a_score_is_the_higher_the_better() -> None:
    task = Mock(**{"score.return_value": 3.0})
    for metric, score in {"loss": -2.0, "accuracy": 0.5, "": 3.0}.items():
        assert (
            score_of(task, {"loss": 2.0, "accuracy": 0.5}, small_config("lenet5", best_metric=metric))
            == score
        )


def test_only_a_padded_vocabulary_has_more_classes_than_labels() -> None:
    assert no_logits(torch.zeros(2, 11), (2,), 10) == "not floating-point logits (2, 10)"
    assert not no_logits(torch.zeros(2, 11), (2,), 10, padded=True)
    assert no_logits(torch.zeros(2, 9), (2,), 10, padded=True) == "not floating-point logits (2, 10)"
