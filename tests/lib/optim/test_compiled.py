"""Compiled updates: one program for all steps, with the numbers and the state of those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager

from lib.optim.adam_8bit import BLOCK, SMALLEST
from lib.optim.factory import make_optimizer
from tests.support.training import clone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]
STEPS = 4
RULES: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", "muon_learning_rate": 0.02, "momentum": 0.95, "nesterov": True},
    "muon without Nesterov": {"name": "muon", "muon_learning_rate": 0.02, "momentum": 0.9},
    "adam_atan2": {"name": "adam_atan2", "sign_learning_rate": 0.01},
    "adam in 8 bits": {"name": "adam", "adam_8bit": True},
    "adamw in 8 bits": {"name": "adamw", "adam_8bit": True},
}
VARIANTS = ("muon without Nesterov", "adam in 8 bits")  # of rules that are tried in another form
# Programs of each: of the matrices; of both groups of Adam-atan2; in 8 bits of blocks, of what remains,
# of small weights and of a single value. Adam's weight decay takes one more.
PROGRAMS = {"muon": 1, "muon without Nesterov": 1, "adam_atan2": 2, "adam in 8 bits": 5, "adamw in 8 bits": 4}


class Net(nn.Module):
    """Weights of several shapes: with and without a rest of a block, and with fewer values than are coded."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        sizes = [(64, 96), (96, 64), (80, 96), (SMALLEST // BLOCK + 3, BLOCK), (67, 71), (96,), (1,), (7, 5)]
        self.all = nn.ParameterList(torch.randn(size, generator=random) for size in sizes)

    def hidden_matrices(self) -> list[nn.Parameter]:
        return [weight for weight in self.all if weight.dim() == 2]

    def sign_parameters(self) -> list[nn.Parameter]:
        return [self.all[-1]]


class Counting:
    """A compiler that keeps the graphs it is given, and generates no code."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def backend(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            self.graphs.append(graph)
            return aot_eager(graph, inputs)  # type: ignore[no-any-return]

        return torch.compile(function, dynamic=False, backend=backend, fullgraph=True)


def optimizer_of(net: Net, rule: str, compiler: Counting | None) -> torch.optim.Optimizer:
    known: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.1, "momentum": None, "nesterov": False}
    known |= {"adam_beta1": 0.9, "adam_beta2": 0.99, "adam_eps": 1e-8}
    return make_optimizer(net, **known | RULES[rule], compiler=compiler)


def run(net: Net, optimizer: torch.optim.Optimizer, *, first: int = 0, last: int = STEPS) -> None:
    """Steps `first` to `last`, each with gradients and a learning rate of its own."""
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        for weight in net.parameters():
            weight.grad = torch.randn(weight.shape, generator=random)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] / (1 + step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def tolerance(rule: str) -> float:
    """Of the weights: a mean that is rounded to another code moves one by a part of the learning rate."""
    return 1e-4 if "8 bits" in rule else 1e-6


def far(net: Net, other: Net) -> float:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.long] if rule in VARIANTS else []) for rule in RULES]
)
def test_a_compiled_update_is_one_program_with_the_numbers_of_before(rule: str) -> None:
    torch._dynamo.reset()
    compiler, nets = Counting(), (Net(), Net())
    optimizers = [optimizer_of(net, rule, each) for net, each in zip(nets, (None, compiler), strict=True)]
    for net, optimizer in zip(nets, optimizers, strict=True):
        run(net, optimizer)
    assert len(compiler.graphs) == PROGRAMS[rule]
    assert far(*nets) < tolerance(rule) < 1e-2 < far(nets[0], Net())


@pytest.mark.parametrize("rule", ["muon", "adam_atan2", "adamw in 8 bits"])
@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.long)])
def test_each_loads_the_state_of_the_other(rule: str, compiled: bool) -> None:
    torch._dynamo.reset()
    compilers = [Counting() if compiled else None, None if compiled else Counting()]
    whole, net, resumed = Net(), Net(), Net()
    run(whole, optimizer_of(whole, rule, None))
    run(net, first := optimizer_of(net, rule, compilers[0]), last=2)
    second = optimizer_of(resumed, rule, compilers[1])
    resumed.load_state_dict(net.state_dict())
    state = clone(first.state_dict())
    second.load_state_dict(state)
    assert described(second.state_dict()) == described(state)
    run(resumed, second, first=2)
    assert far(resumed, whole) < tolerance(rule)


def described(state: Any) -> Any:
    """The keys of a state, with the types and shapes of its tensors."""
    if isinstance(state, Tensor):
        return state.dtype, state.shape
    if isinstance(state, dict):
        return {key: described(value) for key, value in state.items()}
    return [described(each) for each in state] if isinstance(state, list) else type(state)


def test_a_rate_that_is_a_number_makes_a_program_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("lib.optim.muon.send", lambda rate, _: rate.item())
    net, compiler = Net(), Counting()
    run(net, optimizer_of(net, "muon", compiler), last=2)
    assert len(compiler.graphs) == 2
