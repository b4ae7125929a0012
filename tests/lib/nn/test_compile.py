"""Steps that run as CUDA graphs, with a backend that keeps their rules on the CPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext

from lib.config import Config
from lib.errors import ToolkitError
from lib.nn import compile as compiling
from lib.nn.activation_checkpointing import configure_recomputation
from lib.plan.planner import with_smaller_micro_batch
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import data_of, largest_difference, small_config, small_job, small_plan
from train.job import Job, Progress, evaluate
from train.loop import optimizer_step
from train.tasks.base import Sums
from train.training_data import TrainingData

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    # TorchDynamo hides this one, but not from a filter that raises.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
STEPS = 4


class Graphs:
    """A backend with what torch demands of programs that run as CUDA graphs.

    When a step begins, what graphs returned in the one before is overwritten. Inputs that torch takes to be
    at the same address in each replay have to be there.
    """

    def __init__(self) -> None:
        self.replays = 0
        self._step, self._returned = 0, list[Tensor]()

    def backend(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made: Callable[..., Any] = aot_autograd(fw_compiler=self._forward, bw_compiler=self._replayed)
        return made(graph, inputs)  # type: ignore[no-any-return]

    def _forward(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        context = TracingContext.try_get()
        assert context is not None and context.fw_metadata is not None
        return self._replayed(graph, inputs, context.fw_metadata.static_input_indices)

    def _replayed(
        self, graph: fx.GraphModule, _: Sequence[Any], places: Sequence[int] = ()
    ) -> Callable[..., Any]:
        addresses: list[int] = []

        def replay(*arguments: Any) -> Any:
            self._begin()
            found = [arguments[place].data_ptr() for place in places]
            addresses[:] = addresses or found
            assert found == addresses, "an input of a CUDA graph is at another address"
            self.replays += 1
            given = {each.data_ptr() for each in arguments if isinstance(each, Tensor)}
            returned = list(graph(*arguments))
            for place, each in enumerate(returned):
                if isinstance(each, Tensor) and each.data_ptr() not in given:
                    returned[place] = each.clone()
                    self._returned.append(returned[place])
            return returned

        return make_boxed_func(replay)  # type: ignore[no-any-return,no-untyped-call]

    def _begin(self) -> None:
        from torch._inductor.cudagraph_trees import MarkStepBox  # warns where it is imported

        step = MarkStepBox.mark_step_counter
        if step != self._step:
            for each in self._returned:
                each.detach().fill_(torch.nan if each.is_floating_point() else 1)
            self._step, self._returned = step, []


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()

    def compiled(model: nn.Module, *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
        backend: Any = "aot_eager" if options is None else found.backend
        return torch.compile(model, dynamic=False, backend=backend)

    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "compiled", compiled)
    return found


def texts() -> tuple[Config, TrainingData]:
    """Tokens with dropout, whose masks are keyed anew in each step, and an average of the weights."""
    config = small_lm_config(chunked_cross_entropy=False, max_steps=STEPS, ema=True, ema_decay=0.5)
    config = config.replace(model_options=config.model_options | {"dropout": 0.25})
    return config, text_data(config)


def images() -> tuple[Config, TrainingData]:
    """Images with statistics of groups, and gradients that are clipped."""
    config = small_config("resnet18", max_steps=STEPS, norm_batch=4, optimizer="adam", grad_clip=1.0)
    return config, data_of(config)


def jobs(case: Callable[[], tuple[Config, TrainingData]]) -> tuple[Job, Job]:
    """Two of the same steps, the second by CUDA graphs."""
    config, data = case()
    parts = {"compile": True, "compile_parts": ("model", "loss")}
    plan = small_plan(8, norm_batch=config.norm_batch or 0, **parts)
    plain, replayed = (
        small_job(config, dataclasses.replace(plan, cuda_graphs=cuda_graphs), data)
        for cuda_graphs in (False, True)
    )
    return plain, replayed


def trained(job: Job) -> list[dict[str, float]]:
    """Train, with an evaluation after the second step, and read the sums of the steps at the end only."""
    progress, sums, results = Progress(), list[Sums](), list[dict[str, float]]()
    for step in range(STEPS):
        sums += optimizer_step(job, progress)
        progress.step += 1
        if step == 1:
            results.append(evaluate(job))
    return [*results, *({"loss": each.loss.item(), **metrics_of(each)} for each in sums)]


def metrics_of(sums: Sums) -> dict[str, float]:
    return {name: float(value) for name, value in sums.metrics.items()}


def test_a_smaller_micro_batch_does_without_graphs(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are overwritten by the next micro-batch, and here two are accumulated."""
    released = list[str]()
    monkeypatch.setattr(compiling, "release_programs", lambda: released.append("programs"))
    expected, job = jobs(texts)
    smaller = with_smaller_micro_batch(expected.plan)
    assert smaller is not None and smaller.accumulation == 2
    expected.plan = smaller

    def full(**_: Any) -> None:
        raise torch.OutOfMemoryError("full")

    job.cuda_graph_forward = full
    monkeypatch.setattr(job.backend, "release_memory", lambda: released.append("memory"))
    assert trained(job) == trained(expected) and graphs.replays == 0
    assert not job.plan.cuda_graphs and "accumulated" in job.plan.reasons["cuda_graphs"]
    assert job.cuda_graph_forward is None and released == ["programs", "memory"]


@pytest.mark.parametrize("case", [texts, pytest.param(images, marks=pytest.mark.long)])
def test_steps_by_cuda_graphs_are_the_same(
    case: Callable[[], tuple[Config, TrainingData]], graphs: Graphs
) -> None:
    plain, replayed = jobs(case)
    expected, found = trained(plain), trained(replayed)
    assert found == expected and len(found) == STEPS + 1
    assert graphs.replays == 2 * STEPS, "forward and backward of each step; the evaluation is not replayed"
    assert largest_difference(plain.model.state_dict(), replayed.model.state_dict()) == 0


def test_more_shapes_than_torch_allows_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the groups of a network with layer-wise decay, which would silently run without a compiler."""
    programs = doubling_programs(monkeypatch)
    double = compiling.compiled(lambda x: 2 * x)
    for size in range(2, 22):
        assert double(torch.ones(size)).sum() == 2 * size
    assert len(programs) == 20


def test_what_would_run_without_the_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    doubling_programs(monkeypatch)
    monkeypatch.setattr(compiling, "RECOMPILE_LIMIT", 8)
    with torch._dynamo.config.patch(recompile_limit=8):
        double = compiling.compiled(lambda x: 2 * x)
        for size in range(2, 10):
            double(torch.ones(size))
        with pytest.raises(ToolkitError, match=r"torch.compile cannot run here.*recompile_limit"):
            double(torch.ones(10))


def test_what_is_released_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is left of it: on a GPU, the memory of its graphs."""
    programs = doubling_programs(monkeypatch)
    double = compiling.compiled(lambda x: 2 * x)
    for _ in range(2):
        double(torch.ones(2))
    assert len(programs) == 1
    compiling.release_programs()
    double(torch.ones(2))
    assert len(programs) == 2


def doubling_programs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The programs that torch.compile makes from now on."""
    torch._dynamo.reset()
    compiled_by, programs = torch.compile, list[fx.GraphModule]()

    def note(graph: fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        programs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda each, **_: compiled_by(each, dynamic=False, backend=note))
    return programs


def equal_blocks(count: int) -> nn.Module:
    """Of torch's own class, which it compiles in models only."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0) for _ in range(count)))


def test_a_copy_of_a_model_compiled_by_block_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export would trace the compiler, and with the weights of the model that it is a copy of."""
    programs = doubling_programs(monkeypatch)
    model, inputs = equal_blocks(3), torch.ones(2, 1, 4, requires_grad=True)
    expected = model(inputs)
    forward = compiling.compiled_forward(model, model, by_block=True)
    assert torch.equal(forward(inputs), expected) and len(programs) == 1
    torch._dynamo.reset()
    assert torch.equal(copy.deepcopy(model)(inputs), expected) and len(programs) == 1


def test_equal_blocks_that_are_computed_again_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = doubling_programs(monkeypatch)
    model = equal_blocks(3)
    assert configure_recomputation(model, "blocks")
    compiling.compiled_forward(model, model, by_block=True)(
        torch.ones(2, 1, 4, requires_grad=True)
    ).sum().backward()
    assert len(programs) == 1


def test_the_errors_of_blocks_are_those_of_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "RECOMPILE_LIMIT", 1)
    doubling_programs(monkeypatch)
    with torch._dynamo.config.patch(recompile_limit=1):
        model = equal_blocks(2)
        forward = compiling.compiled_forward(model, model, by_block=True)
        forward(torch.ones(2, 1, 4, requires_grad=True))
        with pytest.raises(ToolkitError, match=r"torch.compile cannot run here.*recompile_limit"):
            forward(torch.ones(3, 1, 4, requires_grad=True))


def test_only_the_results_of_graphs_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.ones(2)
    model = nn.Module()
    monkeypatch.setattr(model, "forward", lambda: (found, 3))
    monkeypatch.setattr(torch, "compile", lambda each, **_: each)
    assert compiling.compiled(model)()[0] is found
    copied, number = compiling.cuda_graph_forward(model)()
    assert copied is not found and torch.equal(copied, found) and number == 3


def test_graphs_that_inductor_skips_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", lambda each, **_: each)
    forward = compiling.cuda_graph_forward(nn.Linear(2, 2))
    for _ in range(3):  # such as lengths of texts, each with graphs of its own
        forward(torch.ones(2))
    monkeypatch.setitem(counters["inductor"], "cudagraph_skips", counters["inductor"]["cudagraph_skips"] + 1)
    with pytest.raises(ToolkitError, match=r"no CUDA graphs can be made.*CONFIG_CUDA_GRAPHS=n"):
        forward(torch.ones(2))
