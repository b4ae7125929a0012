"""Muon: orthogonal updates of hidden matrices in stacks, AdamW for the rest, one object for both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.optim.factory import make_optimizer
from lib.optim.muon import Muon, orthogonal, orthogonal_all
from tests.support.tokens import small_lm_config, text_data
from tests.support.training import MemoryRecord, small_job, small_plan, trained
from train.job import Job
from train.loop import load_state_dict, train

SETTINGS: dict[str, Any] = {
    "name": "muon",
    "learning_rate": 0.03,
    "weight_decay": 0.2,
    "momentum": 0.9,
    "nesterov": True,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_eps": 1e-6,
    "muon_learning_rate": 0.05,
}


class Network(nn.Module):
    """An embedding, hidden matrices of three shapes, one of them lying, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 8)
        self.square1, self.square2 = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.square2(self.square1(self.embedding(tokens)).relu())
        return self.head(self.down(self.up(x).relu()))

    def hidden_matrices(self) -> list[nn.Parameter]:
        return [layer.weight for layer in (self.square1, self.square2, self.up, self.down)]


HIDDEN = {"square1.weight", "square2.weight", "up.weight", "down.weight"}


def gradients_of(model: Network, step: int) -> None:
    tokens = (torch.arange(12) * (step + 1)) % 7
    model(tokens).log_softmax(1)[torch.arange(12), (tokens + 1) % 7].mean().neg().backward()


def random_gradients(model: Network, step: int) -> None:
    """Well-conditioned ones: bfloat16 is coarse where some singular values are tiny beside others."""
    random = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)


def steps(model: Network, optimizer: torch.optim.Optimizer, *, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        gradients_of(model, step)
        optimizer.step()


@pytest.mark.parametrize("shape", [(5, 16, 16), (3, 8, 40), (1, 1, 6)])
def test_singular_values_come_near_to_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = orthogonal(matrices)
    values = torch.linalg.svdvals(result)
    # Those that begin far below the largest are still rising; none may overshoot.
    assert values.max() < 1.25 and values.quantile(0.2) > 0.6
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    aligned = (u.mT @ result @ vh.mT).diagonal(dim1=1, dim2=2)
    descending = aligned.sort(dim=1, descending=True).values
    torch.testing.assert_close(descending, values)


def test_a_stack_is_its_matrices_one_by_one_whatever_their_scale() -> None:
    random = torch.Generator().manual_seed(2)
    shapes = [(6, 6), (12, 4), (4, 12), (6, 6)]
    matrices = [torch.randn(shape, generator=random).double() for shape in shapes]
    together = orthogonal_all([10.0**i * matrix for i, matrix in enumerate(matrices)], dtype=None)
    for matrix, result in zip(matrices, together, strict=True):
        [alone] = orthogonal_all([matrix], dtype=None)
        assert result.shape == matrix.shape
        torch.testing.assert_close(result, alone, rtol=1e-9, atol=1e-12)


def test_a_gradient_of_zeros_changes_nothing_but_by_weight_decay() -> None:
    model = Network()
    optimizer = make_optimizer(model, **SETTINGS)
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.up.weight, before.up.weight * (1 - 0.05 * 0.2))
    torch.testing.assert_close(model.head.weight, before.head.weight * (1 - 0.03 * 0.2))
    assert torch.equal(model.up.bias, before.up.bias)


@pytest.mark.parametrize("nesterov", [True, False])
def test_it_is_torchs_muon_and_torchs_adamw(nesterov: bool) -> None:
    model = Network()
    other = copy.deepcopy(model)
    optimizer = make_optimizer(model, **SETTINGS | {"nesterov": nesterov}, product_dtype=torch.bfloat16)
    hidden = other.hidden_matrices()
    rest = [p for p in other.parameters() if all(p is not matrix for matrix in hidden)]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": 0.2},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    rules = [
        torch.optim.Muon(hidden, lr=0.05, weight_decay=0.2, momentum=0.9, nesterov=nesterov),
        torch.optim.AdamW(groups, lr=0.03, betas=(0.8, 0.95), eps=1e-6),
    ]
    for step in range(4):
        random_gradients(model, step)
        random_gradients(other, step)
        for rule in [optimizer, *rules]:
            rule.step()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        # Torch's products are in bfloat16, too, but in another order.
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3 if name in HIDDEN else 1e-6)


def test_filters_are_matrices_of_a_row_for_each_output() -> None:
    random = torch.Generator().manual_seed(0)
    start, gradient = (torch.randn(6, 3, 2, 2, generator=random).double() for _ in range(2))
    filters, matrix = nn.Parameter(start.clone()), nn.Parameter(start.flatten(1).clone())
    filters.grad = gradient.contiguous(memory_format=torch.channels_last)
    matrix.grad = gradient.flatten(1)
    for weight in (filters, matrix):
        rest = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
        own: dict[str, Any] = {"learning_rate": 0.1, "weight_decay": 0.1, "momentum": 0.5, "nesterov": True}
        Muon([weight], rest, product_dtype=None, **own).step()
    torch.testing.assert_close(filters.detach().flatten(1), matrix.detach(), rtol=0, atol=0)
    assert not torch.equal(filters, start)


def test_groups_have_their_own_peaks_and_every_parameter_is_in_one() -> None:
    model = Network()
    optimizer = make_optimizer(model, **SETTINGS)
    decaying, others, hidden = optimizer.param_groups
    assert [group["peak_lr"] for group in optimizer.param_groups] == [0.03, 0.03, 0.05]
    assert [id(p) for p in hidden["params"]] == [id(p) for p in model.hidden_matrices()]
    assert [id(p) for p in decaying["params"]] == [id(model.embedding.weight), id(model.head.weight)]
    assert all(p.dim() == 1 for p in others["params"])
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_a_group_follows_its_own_rate() -> None:
    model = Network()
    optimizer = make_optimizer(model, **SETTINGS)
    optimizer.param_groups[2]["lr"] = 0.0
    before = copy.deepcopy(model)
    steps(model, optimizer, first=0, count=1)
    assert torch.equal(model.up.weight, before.up.weight)
    assert not torch.equal(model.head.weight, before.head.weight)


def test_going_on_from_a_saved_state_is_bit_equal() -> None:
    whole = Network()
    optimizer = make_optimizer(whole, **SETTINGS)
    steps(whole, optimizer, first=0, count=2)
    model_state, state = copy.deepcopy(whole.state_dict()), copy.deepcopy(optimizer.state_dict())
    steps(whole, optimizer, first=2, count=3)

    resumed = Network()
    resumed.load_state_dict(model_state)
    other = make_optimizer(resumed, **SETTINGS)
    other.load_state_dict(state)
    steps(resumed, other, first=2, count=3)
    assert all(torch.equal(tensor, resumed.state_dict()[key]) for key, tensor in whole.state_dict().items())

    fresh = Network()
    fresh.load_state_dict(model_state)
    steps(fresh, make_optimizer(fresh, **SETTINGS), first=2, count=3)
    assert not torch.equal(fresh.up.weight, whole.up.weight), "the state makes no difference"


def test_products_may_be_in_another_type_than_the_weights() -> None:
    single, half = Network(), Network()
    for model, dtype in ((single, None), (half, torch.bfloat16)):
        random_gradients(model, 0)
        make_optimizer(model, **SETTINGS, product_dtype=dtype).step()
    assert half.up.weight.dtype == torch.float32
    difference = (single.up.weight - half.up.weight).abs().max()
    assert 0 < difference < 0.05 * 0.05


def test_a_model_that_does_not_name_its_matrices_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear does not name its hidden matrices"):
        make_optimizer(nn.Linear(2, 2), **SETTINGS)


def test_it_is_an_optimizer_to_a_loss_scaler() -> None:
    model = Network()
    optimizer = make_optimizer(model, **SETTINGS)
    assert isinstance(optimizer, Muon)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    gradients_of(model, 0)
    before = copy.deepcopy(model)
    model.up.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler.scale(torch.zeros(1))  # creates the scale
    scaler.step(optimizer)
    assert torch.equal(model.head.weight, before.head.weight), "a step with overflow was not left out"


# In the loop


def muon_job(steps: int) -> Job:
    config = small_lm_config(optimizer="muon", momentum=0.9, nesterov=True, max_steps=steps)
    rates = {"learning_rate": 0.002, "muon_learning_rate": 0.03, "schedule": "step"}
    constants = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
    steps_down = {"lr_step_pct_list": (50,), "lr_step_gamma": 0.5}
    config = config.replace(**rates, **constants, **steps_down)
    return small_job(config, small_plan(4), text_data(config))


def test_a_schedule_scales_each_group_from_its_own_peak() -> None:
    job, rates = muon_job(2), []
    job.optimizer.register_step_pre_hook(
        lambda optimizer, *_: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    trained(job)
    assert rates == [[0.002, 0.002, 0.03], [0.001, 0.001, 0.015]]
    assert len(job.optimizer.param_groups[2]["params"]) == 8


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits() -> None:
    record = MemoryRecord()
    job = muon_job(4)
    job.record, job.config = record, job.config.replace(checkpoint_interval_steps=1)
    whole = trained(job)
    resumed = muon_job(4)
    train(resumed, load_state_dict(resumed, record.states[2]))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.model.state_dict().items())
