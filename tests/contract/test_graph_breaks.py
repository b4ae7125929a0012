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
from train.generate import Sampling, continuation
from train.job import Job, Progress
from train.loop import accumulate_gradients

pytestmark = [
    # By torch's own tracing of its functions.
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    # By its look at what a block is given; it hides this warning, but not from a filter that raises.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
LOSS_IN_MODEL = "gpt2"  # which takes targets: its graph has the loss of the head
# Compiled by block: programs of one step. Equal blocks share one; others differ in their shapes, and trm runs
# its blocks without gradients, too.
PROGRAMS = {
    "mlp": 2,
    "resnet18": 7,
    "resnet50": 8,
    "gpt2": 1,
    "gpt2 with labels and dropout": 1,
    "resnet_bk": 1,
    "vit": 1,
    "trm": 2,
    "trm with an embedding": 2,
}
IN_MAKE_TEST = ("mlp", "gpt2 with labels and dropout", "trm")
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


def job_by_block(defconfig: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Job:
    """A job whose blocks are compiled, but for the compiler."""
    by_torch = torch.compile
    monkeypatch.setattr(torch, "compile", lambda each, **_: by_torch(each, dynamic=False, backend="eager"))
    return job_of(defconfig, compile="manual", compile_model=True, compile_blocks=True, **changes)


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
@pytest.mark.parametrize(
    "name",
    [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.long) for name in PROGRAMS],
)
def test_equal_blocks_are_one_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of dropout, too, whose masks differ; gradients are those of what is not compiled."""
    blocks = {"grad_checkpoint": "blocks"} if name in IN_MAKE_TEST else {}
    plain = job_of(DEFCONFIGS[name], **blocks)
    by_block = job_by_block(DEFCONFIGS[name], monkeypatch, **blocks)
    assert by_block.plan.compile_parts[0] == "blocks" and "loss" not in by_block.plan.compile_parts
    assert graphs_and_breaks(by_block) == (PROGRAMS[name], 0)
    assert graphs_and_breaks(plain) == (0, 0)
    if (
        name == "resnet50"
    ):  # compiled, statistics are computed in another order, and it has many layers of them
        return
    for (weight, expected), (_, found) in zip(*map(gradients, (plain, by_block)), strict=True):
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), weight


@pytest.mark.slow
def test_a_text_is_generated_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its lengths would be a program."""
    job = job_by_block(DEFCONFIGS["gpt2"], monkeypatch)
    torch._dynamo.reset()
    counters.clear()
    sampling = Sampling(tokens=5, temperature=1.0, top_k=0, seed=0)
    assert len(continuation(job, [1, 2, 3], sampling=sampling, vocab_size=60)) == 5
    assert counters["stats"]["unique_graphs"] == 0
    job.forward(torch.zeros(1, 8, dtype=torch.int64))
    assert counters["stats"]["unique_graphs"] == 1, "the control"


def gradients(job: Job) -> list[tuple[str, torch.Tensor]]:
    return [(name, each.grad) for name, each in job.model.named_parameters() if each.grad is not None]


@pytest.mark.parametrize("name", sorted(DEFCONFIGS.keys() - PROGRAMS.keys()))
def test_a_model_without_blocks_is_compiled_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = job_by_block(DEFCONFIGS[name], monkeypatch).plan
    assert plan.compile_parts[0] == "model"
    assert "CONFIG_COMPILE_BLOCKS=y has no effect" in plan.reasons["compile_parts"]


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
