"""The training loss is compiled with the model: one graph for all steps, and the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch.testing._internal.distributed.fake_pg import FakeStore

from lib.config import Config
from lib.devices.base import Backend
from lib.plan.types import Plan
from tests.lib.plan.test_fake_group import FakeRank
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import largest_difference, random_data, small_config, small_job, small_plan
from train.job import Job, Progress, evaluate
from train.loop import load_state_dict, optimizer_step, state_dict
from train.tasks.base import Sums, loss_apart
from train.tasks.classify.task import Classify
from train.training_data import TrainingData

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]
STEPS = 4


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that TorchDynamo makes; the rest is torch's, but for its generator of code."""
    found: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(graph)
        return aot_eager(graph, inputs)  # type: ignore[no-any-return]

    def compiled(model: Any) -> Any:
        return torch.compile(model, dynamic=False, backend=backend)

    torch._dynamo.reset()
    monkeypatch.setattr("lib.nn.compile.compiled", compiled)
    return found


def texts() -> tuple[Config, TrainingData]:
    """Tokens with dropout, whose masks are keyed anew in each step."""
    config = small_lm_config(chunked_cross_entropy=False, schedule="cosine", max_steps=STEPS)
    config = config.replace(model_options=config.model_options | {"dropout": 0.25})
    return config, text_data(config)


def images() -> tuple[Config, TrainingData]:
    config = small_config(schedule="cosine", max_steps=STEPS, label_smoothing=0.1)
    return config, random_data(config, shape=(1, 28, 28), train_size=40, test_size=9)


def plans(*micro_batches: int, **changes: Any) -> tuple[Plan, Plan]:
    """The same steps, not compiled and compiled."""
    eager = small_plan(*micro_batches, **changes)
    return eager, dataclasses.replace(eager, compile=True, compile_parts=("model", "loss"))


def losses(graph: fx.GraphModule) -> int:
    return sum("cross_entropy" in str(node.target) for node in graph.graph.nodes)


def steps(job: Job, progress: Progress, count: int) -> list[Sums]:
    found = []
    for _ in range(count):
        found += optimizer_step(job, progress)
        progress.step += 1
    return found


@pytest.mark.parametrize("case", [texts, images])
def test_it_is_one_graph_in_all_steps_with_the_numbers_of_before(
    case: Callable[[], tuple[Config, TrainingData]], graphs: list[fx.GraphModule]
) -> None:
    """The learning rate and the keys of dropout change, and the last micro-batch has a row of padding."""
    config, data = case()
    eager, compiled = plans(4, 4, 3)
    assert compiled.is_padded and compiled.compile_parts == ("model", "loss")
    jobs = [small_job(config, plan, data) for plan in (eager, compiled)]
    expected, found = (steps(job, Progress(), STEPS) for job in jobs)
    assert len(graphs) == 1 and losses(graphs[0]) == 1
    for own, other in zip(found, expected, strict=True):
        assert own.loss.item() == pytest.approx(other.loss.item(), rel=1e-12)
        assert own.metrics == other.metrics
    assert sum(float(own.count) for own in found) == sum(float(other.count) for other in expected)
    assert largest_difference(*(job.model.state_dict() for job in jobs)) < 1e-12
    results = [evaluate(job) for job in jobs]
    assert results[1] == pytest.approx(results[0], rel=1e-9)
    assert len(graphs) == 2 and not losses(graphs[1]), "an evaluation computes its loss apart"


def test_a_resumed_run_ends_with_the_same_bits(graphs: list[fx.GraphModule]) -> None:
    config, data = texts()
    _, compiled = plans(4, 4, 3)
    steps(whole := small_job(config, compiled, data), Progress(), STEPS)
    first = small_job(config, compiled, data)
    steps(first, progress := Progress(), 2)
    second = small_job(config, compiled, data)
    steps(second, load_state_dict(second, state_dict(first, progress)), STEPS - 2)
    assert graphs and largest_difference(whole.model.state_dict(), second.model.state_dict()) == 0


@pytest.mark.parametrize("parts", [("model", "loss"), ("model",)])
def test_replicas_have_the_loss_in_the_graph_of_the_model(
    parts: tuple[str, ...], graphs: list[fx.GraphModule]
) -> None:
    config, data = images()
    plan = small_plan(4, 4, world=2, compile=True, compile_parts=parts)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        job = small_job(config, plan, data, backend=FakeRank(rank=0, world=2))
        steps(job, Progress(), 2)
    finally:
        dist.destroy_process_group()
    assert [losses(graph) for graph in graphs] == [int("loss" in parts)]
    assert all(weight.grad is None for weight in job.model.parameters())


def test_what_overrides_a_pure_loss_is_not_pure() -> None:
    class Counting(Classify):
        calls = 0

        def training(self, *arguments: Any) -> Sums:
            self.calls += 1
            return super().training(*arguments)

    assert loss_apart(Classify(), iterated=False) == ""
    assert loss_apart(Counting(), iterated=False) == "Counting.training is not marked as pure"
    assert loss_apart(Classify(), iterated=True) == "the model is compiled by iteration"


def test_another_task_is_asked_by_itself(graphs: list[fx.GraphModule]) -> None:
    """Where the plan does not have the loss in the graph."""
    config, data = images()
    job = small_job(config, small_plan(4, compile=True), data, backend=Backend("cpu"))
    steps(job, Progress(), 1)
    assert len(graphs) == 1 and not losses(graphs[0]) and job.wrapped is job.model
