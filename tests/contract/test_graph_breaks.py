"""Compiled, the forward pass of every model with its loss is one graph: no break, and no recompilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lib.nn import linear_cross_entropy
from tests.contract.test_static_graph import DEFCONFIGS, MARKS, job_of
from tests.support.examples import merged
from train.job import Job, Progress
from train.loop import accumulate_gradients

# By torch's own tracing of its functions.
pytestmark = pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
LOSS_IN_MODEL = "gpt2"  # which takes targets: its graph has the loss of the head
LOSS_APART = merged("STATIC_GRAPH")  # experiments: their tasks keep state, or ask frozen models


def compiled_job(
    defconfig: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Any], Any] = lambda forward: forward,
) -> Job:
    """A job that is compiled as a plan says, but for the compiler, which breaks nothing."""

    def compiled(forward: Callable[..., Any]) -> Any:
        return torch.compile(change(forward), dynamic=False, backend="eager")

    monkeypatch.setattr("lib.nn.compile.compiled", compiled)
    return job_of(defconfig, compile="manual", compile_model=True)


def graphs_and_breaks(job: Job) -> tuple[int, int]:
    """Graphs that training compiles in three steps of two micro-batches, and breaks in them."""
    torch._dynamo.reset()
    counters.clear()
    for step in range(3):
        assert len(list(accumulate_gradients(job, Progress(step=step)))) == 2
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow) or pytest.mark.slow) for name in DEFCONFIGS],
)
def test_a_model_is_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = compiled_job(DEFCONFIGS[name], monkeypatch)
    assert graphs_and_breaks(job) == (1, 0)
    assert ("loss" in job.plan.compile_parts) != (name in LOSS_APART), job.plan.reasons["compile_parts"]


@pytest.mark.slow
def test_so_it_is_with_the_loss_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(linear_cross_entropy, "_ROWS", 1)
    monkeypatch.setattr(linear_cross_entropy, "kernels_for", lambda _: "cuda")
    monkeypatch.setattr(linear_cross_entropy, "_losses", lambda *_, **__: asked.append(1))
    assert graphs_and_breaks(compiled_job(DEFCONFIGS[LOSS_IN_MODEL], monkeypatch)) == (1, 0)
    assert not asked, "the loss was that for a CPU"


@pytest.mark.slow
def test_a_break_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(forward: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            torch._dynamo.graph_break()
            return forward(*arguments, **named)

        return changed

    job = compiled_job(DEFCONFIGS[LOSS_IN_MODEL], monkeypatch, breaks)
    assert graphs_and_breaks(job)[1] > 0
