"""Chains of blocks whose activations are computed again: any block, and nothing outside of training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.nn.activation_checkpointing import Chain, Recompute, configure_recomputation

WIDTH = 6


class Noisy(nn.Module):
    """Normalisation and dropout of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x_NC: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x_NC)).relu(), 0.3, self.training)


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noisy() for _ in range(depth))
        self.chain = Chain()

    def forward(self, x_NC: Tensor) -> Tensor:
        return self.chain(x_NC, *self.blocks)


def net(recompute: Recompute, *, depth: int = 5) -> Net:
    torch.manual_seed(0)
    model = Net(depth)
    configure_recomputation(model, recompute)
    return model


def trained(model: Net) -> list[Tensor]:
    """Gradients of a step, and buffers after it."""
    torch.manual_seed(1)
    model(torch.randn(8, WIDTH)).square().sum().backward()
    return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("recompute", ["blocks", "all"])
def test_random_numbers_and_statistics_of_torch_happen_once(recompute: Recompute) -> None:
    plain, again = trained(net("none")), trained(net(recompute))
    assert len(plain) == len(again) and all(map(torch.equal, plain, again))


def runs_of(recompute: Recompute, run: Callable[[Net], object]) -> list[int]:
    """How often each of five blocks ran."""
    model, runs = net(recompute), [0] * 5
    for number, block in enumerate(model.blocks):

        def count(*_: object, number: int = number) -> None:
            runs[number] += 1

        block.register_forward_pre_hook(count)
    run(model)
    return runs


def test_blocks_run_as_often_as_is_said() -> None:
    assert runs_of("none", trained) == [1] * 5
    assert runs_of("blocks", trained) == [2] * 5
    # Of a group (of three, here) the last one's input is all that has to be there first.
    assert runs_of("all", trained) == [3, 3, 2, 3, 2]


def test_without_gradients_nothing_is_computed_again() -> None:
    with torch.no_grad():
        assert runs_of("all", lambda model: model.eval()(torch.randn(3, WIDTH))) == [1] * 5


def test_a_model_without_blocks_cannot_be_told_to() -> None:
    configure_recomputation(nn.Linear(2, 2), "none")
    with pytest.raises(ConfigError, match=r"CONFIG_GRAD_CHECKPOINT_ALL=y is not possible: Linear runs no"):
        configure_recomputation(nn.Linear(2, 2), "all")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["blocks", "all"])
def test_compiled_it_is_the_same(recompute: Recompute) -> None:
    """Without the compiler's last stage, which needs a compiler of C++ and rounds otherwise."""
    plain, again = net("none"), net(recompute)
    for model in (plain, again):
        model.eval()  # without dropout: a compiled one draws other numbers
        for block in model.blocks:
            block.norm.train()
    expected = trained(plain)
    torch.manual_seed(1)
    compiled = torch.compile(again, backend="aot_eager", dynamic=False, fullgraph=True)
    compiled(torch.randn(8, WIDTH)).square().sum().backward()
    found = [*(p.grad for p in again.parameters() if p.grad is not None), *again.buffers()]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)
