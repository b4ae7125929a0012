"""Every model's training step is one graph from the second on: nothing in it asks the host what to do.

But for models that ask whether their states have settled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.nn.graph_lint import IteratesToConvergence, LintReport, lint
from lib.plan import plan as make_plan
from tests.contract.cases import NAMES
from tests.contract.test_life_of_a_value import data_of, narrow_config
from tests.support.examples import examples, merged
from tests.support.training import CPU, Wrapped, small_job
from train import loop
from train.job import Job, Progress
from train.tasks.base import Sums

# A configuration for each model, and what else has code of its own in a step.
DEFCONFIGS = {
    "lenet5": "lenet5",
    "mlp": "tabular-regression",
    "resnet18": "resnet18",
    "resnet50": "resnet50",
    "gpt2": "gpt2-tiny",
    "gpt2 with labels and dropout": "gpt2-sst2",
    "resnet_bk": "resnet_bk",
    "vit": "vit-tiny-scenes",
    "airbench": "cifar10-fast",
    **merged("STATIC_GRAPH"),
}
MARKS = {"lenet5": (), "gpt2": (), "resnet50": pytest.mark.long}
SETTLING = merged("NO_STATIC_GRAPH")  # the same for models of which no graph could hold a step


def job_of(defconfig: str, **changes: Any) -> Job:
    """Two micro-batches a step, averaged weights, and the optimizer that the configuration has."""
    config = narrow_config(defconfig).replace(batch_size=16, ema=True, ema_decay=0.9, **changes)
    config = config.replace(**getattr(examples().get(config.model), "OWN_OPTIMIZER", {}))
    data = data_of(config)
    return small_job(config, make_plan(config, CPU, data.facts), data, dtype=torch.float32)


def report_of(job: Job) -> LintReport:
    return lint(lambda step: loop.optimizer_step(job, Progress(step=step)))


def test_every_model_is_there() -> None:
    assert {name.split()[0] for name in DEFCONFIGS} | SETTLING.keys() == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTLING)
def test_states_that_settle_are_looked_at(name: str) -> None:
    job = job_of(SETTLING[name])
    assert isinstance(job.model, IteratesToConvergence) and not report_of(job).is_static


def test_others_do_not_settle() -> None:
    assert not isinstance(job_of("lenet5").model, IteratesToConvergence)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in DEFCONFIGS],
)
def test_a_step_is_one_graph(name: str) -> None:
    report = report_of(job_of(DEFCONFIGS[name]))
    assert report.is_static, list(report.lines())


@pytest.mark.slow
def test_a_task_that_looks_at_its_loss_is_found_out() -> None:
    class Looks(Wrapped):
        def training(self, *arguments: object) -> Sums:  # type: ignore[override]
            sums = super().training(*arguments)  # type: ignore[arg-type]
            assert sums.loss.detach() > 0
            return sums

    job = job_of("gpt2-tiny")
    job.task = Looks(job.task)
    report = report_of(job)
    assert not report.is_static and sum(report.faults.values()) == 3 * 2
