"""Ghost batch norm: the same training however a batch is split; with norm_batch 0, torch's own layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.errors import ConfigError
from lib.nn.batch_norm import (
    GhostBatchNorm2d,
    commit_statistics,
    configure_norm,
    discard_statistics,
    weigh_groups,
)

GROUP, EFFECTIVE = 4, 24
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def network(norm_batch: int, *, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()]
    second = [nn.Conv2d(6, 5, 3, stride=2), nn.BatchNorm2d(5), nn.ReLU()]
    model = nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(45, 7))
    configure_norm(model, norm_batch=norm_batch, momentum=0.1)
    return model.to(dtype)


def samples(count: int, *, dtype: torch.dtype = torch.float64, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, 9, 9, generator=torch.Generator().manual_seed(1), dtype=dtype)


def trained(norm_batch: int, micro_batch: int, *, steps: int = 3) -> dict[str, Tensor]:
    """Everything that training leaves behind after some steps of SGD with accumulation."""
    model = network(norm_batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    labels = torch.arange(EFFECTIVE) % 7
    for step in range(steps):
        images = samples(EFFECTIVE).roll(step, dims=3)
        micro_batches = zip(images.split(micro_batch), labels.split(micro_batch), strict=True)
        for x, y in micro_batches:
            (F.cross_entropy(model(x), y, reduction="sum") / EFFECTIVE).backward()
        commit_statistics(model)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor], *, only: str = "") -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a if only in name)


@pytest.mark.parametrize("micro_batch", [4, 8, 12])
def test_training_does_not_depend_on_the_micro_batch(micro_batch: int) -> None:
    assert largest_difference(trained(GROUP, EFFECTIVE), trained(GROUP, micro_batch)) <= 1e-12


@pytest.mark.parametrize("part", ["weight", "running_mean", "running_var"])
def test_training_with_plain_batch_norm_does(part: str) -> None:
    assert largest_difference(trained(0, EFFECTIVE), trained(0, 4), only=part) > 1e-3


def test_the_ghost_batch_size_is_part_of_the_mathematics() -> None:
    assert largest_difference(trained(4, EFFECTIVE), trained(8, EFFECTIVE)) > 1e-3


def test_several_devices_commit_what_one_does() -> None:
    one = network(GROUP)
    ranks = [copy.deepcopy(one) for _ in range(2)]
    images = samples(EFFECTIVE)
    one(images)
    for rank, shard in zip(ranks, images.chunk(2), strict=True):
        rank(shard)
    reduced: list[Tensor] = []
    commit_statistics(copy.deepcopy(ranks[1]), reduced.append)  # what the other rank sends
    assert len(reduced) == 1, "one collective for all layers"
    assert reduced[0].dim() == 1
    commit_statistics(ranks[0], lambda flat: flat.add_(reduced[0]))
    commit_statistics(one)
    assert largest_difference(one.state_dict(), ranks[0].state_dict()) <= 1e-15


def test_norm_batch_0_is_torchs_layer() -> None:
    plain, ghost = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    configure_norm(plain, norm_batch=0, momentum=0.1)
    assert type(plain) is nn.BatchNorm2d
    configure_norm(ghost, norm_batch=GROUP, momentum=0.1)
    configure_norm(ghost, norm_batch=0, momentum=0.1)
    for _ in range(2):
        assert torch.equal(ghost(samples(6)), plain(samples(6)))
    commit_statistics(ghost)
    assert all(torch.equal(ghost.get_buffer(name), plain.get_buffer(name)) for name in RUNNING)
    assert torch.equal(ghost.eval()(samples(6)), plain.eval()(samples(6)))


def test_layers_become_ghost_ones_in_place_and_their_state_keeps_its_names() -> None:
    layer = nn.BatchNorm2d(3)
    weight, names = layer.weight, list(layer.state_dict())
    model = nn.Sequential(layer)
    configure_norm(model, norm_batch=GROUP, momentum=0.1)
    assert model[0] is layer and layer.weight is weight and isinstance(layer, GhostBatchNorm2d)
    assert list(layer.state_dict()) == names == ["weight", "bias", *RUNNING]
    layer.load_state_dict(nn.BatchNorm2d(3).state_dict())


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (5,)),
        (nn.BatchNorm1d, (5, 4)),
        (nn.BatchNorm2d, (5, 3, 4)),
        (nn.BatchNorm3d, (5, 2, 3, 2)),
    ],
)
def test_layers_of_torch_have_the_same_gradients_however_a_batch_is_split(
    kind: Any, shape: tuple[int, ...], affine: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: at_once)
    x_NC = torch.randn(EFFECTIVE, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: list[list[Tensor]] = []
    for micro_batch in (EFFECTIVE, GROUP, 2 * GROUP, 3 * GROUP):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(x_NC[0].numel(), x_NC[0].numel()), nn.Unflatten(1, shape)
        )
        model.append(kind(5, affine=affine)).double()
        configure_norm(model, norm_batch=GROUP, momentum=0.1)
        for part in x_NC.split(micro_batch):
            model(part).pow(3).sum().backward()
        commit_statistics(model)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([*gradients, *(model[-1].get_buffer(name) for name in RUNNING)])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_one_group_per_step_is_torchs_layer_with_deferred_statistics() -> None:
    ours, theirs = nn.BatchNorm2d(3).double(), nn.BatchNorm2d(3, momentum=0.3).double()
    configure_norm(ours, norm_batch=6, momentum=0.3)
    before = copy.deepcopy(ours.state_dict())
    assert torch.equal(ours(samples(6)), theirs(samples(6)))
    assert all(torch.equal(before[name], ours.state_dict()[name]) for name in before), "moved in forward"
    commit_statistics(ours)
    for name in RUNNING:
        torch.testing.assert_close(ours.get_buffer(name), theirs.get_buffer(name), rtol=1e-14, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_group_has_the_same_bits_alone_and_in_company(layout: torch.memory_format) -> None:
    def run(micro_batch: int) -> tuple[Tensor, Tensor, Tensor]:
        layer = nn.BatchNorm2d(3).double()
        configure_norm(layer, norm_batch=GROUP, momentum=0.1)
        x = samples(EFFECTIVE).contiguous(memory_format=layout).requires_grad_()
        y = torch.cat([layer(part) for part in x.split(micro_batch)])
        y.backward(samples(EFFECTIVE).flip(0).contiguous(memory_format=layout))
        assert x.grad is not None
        return y.detach(), x.grad, layer.pending_3C

    for alone, company in zip(run(GROUP), run(EFFECTIVE), strict=True):
        assert torch.equal(alone, company)


def test_rows_that_are_no_multiple_are_refused_in_training_only() -> None:
    model = network(GROUP)
    with pytest.raises(ValueError, match="6 rows cannot be split into ghost batches of 4"):
        model(samples(6))
    assert model.eval()(samples(6)).shape == (6, 7)


def test_evaluation_and_a_discarded_step_leave_no_trace() -> None:
    model = network(GROUP)
    before = copy.deepcopy(model.state_dict())
    model(samples(8))
    discard_statistics(model)
    model.eval()(samples(8))
    commit_statistics(model)
    for name in before:
        if "num_batches" not in name:
            assert torch.equal(before[name], model.state_dict()[name]), name


def test_a_layer_that_saw_no_group_keeps_its_statistics_when_another_saw_one() -> None:
    model = nn.ModuleList([nn.BatchNorm2d(3), nn.BatchNorm2d(3)])
    configure_norm(model, norm_batch=GROUP, momentum=0.1)
    model[1](samples(GROUP, dtype=torch.float32))
    commit_statistics(model)
    assert torch.equal(model[0].running_var, torch.ones(3))
    assert not torch.equal(model[1].running_var, torch.ones(3))


def test_running_statistics_move_by_the_momentum() -> None:
    slow, fast = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    for layer, momentum in ((slow, 0.1), (fast, 0.3)):
        configure_norm(layer, norm_batch=GROUP, momentum=momentum)
        layer(samples(GROUP, dtype=torch.float32))
        commit_statistics(layer)
    torch.testing.assert_close(fast.running_mean, 3 * slow.running_mean)
    torch.testing.assert_close(fast.running_var - 1, 3 * (slow.running_var - 1))


@pytest.mark.parametrize("at_once", [False, True])
def test_groups_of_padding_leave_no_trace(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: at_once)
    padded, whole = network(GROUP), network(GROUP)
    images = samples(3 * GROUP)
    weights = torch.tensor([1.0] * 2 * GROUP + [0.0] * GROUP)
    weigh_groups(padded, weights)
    torch.testing.assert_close(padded(images)[: 2 * GROUP], whole(images[: 2 * GROUP]), rtol=0, atol=1e-12)
    weigh_groups(padded, 0 * weights[:GROUP])  # nothing but padding
    padded(images[:GROUP])
    for model in (padded, whole):
        commit_statistics(model)
    assert largest_difference(padded.state_dict(), whole.state_dict()) <= 1e-12
    for model in (padded, whole):  # the weights held for one step
        model(images)
        commit_statistics(model)
    assert largest_difference(padded.state_dict(), whole.state_dict()) <= 1e-12


def test_each_step_starts_from_nothing() -> None:
    once, twice = network(GROUP), network(GROUP)
    for model in (once, twice):
        model(samples(8))
        commit_statistics(model)
    twice(samples(8).flip(1))
    commit_statistics(twice)
    once(samples(8).flip(1))
    for layer in once[1], once[4]:
        layer.running_mean.lerp_(layer.pending_3C[0] / 2, 0.1)
        torch.testing.assert_close(layer.pending_3C[2], torch.full_like(layer.pending_3C[2], 2))
    for at in (1, 4):
        torch.testing.assert_close(once[at].running_mean, twice[at].running_mean)


@pytest.mark.parametrize("rows", [GROUP, 3 * GROUP])
def test_under_autocast_statistics_are_fp32_and_the_layout_is_kept(rows: int) -> None:
    layer = nn.BatchNorm2d(16)
    configure_norm(layer, norm_batch=GROUP, momentum=0.1)
    x = samples(rows, dtype=torch.float32, channels=16).to(torch.bfloat16, memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert layer.pending_3C.dtype == torch.float32
    groups = x.float().view(-1, GROUP, 16, 9, 9)
    torch.testing.assert_close(layer.pending_3C[0], groups.mean((1, 3, 4)).sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.pending_3C[1], groups.var((1, 3, 4)).sum(0), rtol=1e-5, atol=1e-6)


@pytest.fixture
def _dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_dynamo")
@pytest.mark.parametrize("rows", [GROUP, EFFECTIVE])
def test_compiled_without_graph_breaks_it_computes_the_same(rows: int) -> None:
    models = [network(GROUP) for _ in range(2)]
    compiled = torch.compile(models[1], backend="eager", fullgraph=True, dynamic=False)
    for model, forward in zip(models, (models[0], compiled), strict=True):
        forward(samples(rows)).square().sum().backward()
        commit_statistics(model)
    assert largest_difference(models[0].state_dict(), models[1].state_dict()) <= 1e-12
    for eager, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(eager.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_meta_device() -> None:
    with torch.device("meta"):
        layer = nn.BatchNorm2d(3)
        configure_norm(layer, norm_batch=GROUP, momentum=0.1)
        assert layer(torch.empty(8, 3, 5, 5)).shape == (8, 3, 5, 5)
        commit_statistics(layer)


class Own(nn.BatchNorm2d):
    """What a model may derive: a forward pass of its own, with an activation that works in place."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu_(super().forward(input))


class Folded(nn.Module):
    """Tokens are rows of its normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(9, 5), nn.BatchNorm1d(5)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x_NTC = self.linear(x_NCHW.flatten(1, 2))
        return self.norm(x_NTC.flatten(0, 1)).view_as(x_NTC).mean(1)


@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(nn.Conv2d(3, 5, 3), Own(5), Own(5, affine=False)), Folded]
)
def test_derived_layers_and_rows_of_tokens_are_in_groups_of_samples(make: Any) -> None:
    found = []
    for micro_batch in (EFFECTIVE, GROUP, 3 * GROUP):
        torch.manual_seed(0)
        model = make().double()
        assert configure_norm(model, norm_batch=GROUP, momentum=0.1) > 0
        for part in samples(EFFECTIVE).split(micro_batch):
            model(part).pow(3).sum().backward()
        counts = [layer.pending_3C[2] for layer in model.modules() if hasattr(layer, "pending_3C")]
        assert counts and all((count == EFFECTIVE / GROUP).all() for count in counts), "groups of samples"
        commit_statistics(model)
        found.append([*(weight.grad for weight in model.parameters()), *model.buffers()])
        assert any(int(count) for name, count in model.named_buffers() if "tracked" in name)
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_derived_layer_in_evaluation_and_alone_is_what_it_was() -> None:
    ours, theirs = Own(3).double(), Own(3, momentum=0.3).double()
    configure_norm(ours, norm_batch=6, momentum=0.3)
    assert torch.equal(ours(samples(6)), theirs(samples(6))) and type(ours).__name__ == "GhostOwn"
    commit_statistics(ours)
    for name in RUNNING:
        torch.testing.assert_close(ours.get_buffer(name), theirs.get_buffer(name), rtol=1e-14, atol=0)
    assert torch.equal(ours.eval()(samples(5)), theirs.eval()(samples(5)))


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.SyncBatchNorm(4), "1 of the model is a SyncBatchNorm, which has no groups"),
        (nn.BatchNorm2d(4, track_running_stats=False), "a BatchNorm2d with track_running_stats=False"),
    ],
)
def test_what_has_no_groups_is_refused(layer: nn.Module, told: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), layer)
    configure_norm(model, norm_batch=0, momentum=0.1)
    with pytest.raises(ConfigError, match=f"CONFIG_NORM_BATCH=8 is not possible: .*{told}; use BatchNorm1d"):
        configure_norm(model, norm_batch=8, momentum=0.1)


@pytest.mark.parametrize("norm_batch", [0, GROUP])
def test_the_momentum_is_the_configured_one_or_else_the_layers(norm_batch: int) -> None:
    layer = nn.BatchNorm2d(4, momentum=0.25)
    configure_norm(layer, norm_batch=norm_batch, momentum=None)
    assert layer.momentum == 0.25
    configure_norm(layer, norm_batch=norm_batch, momentum=0.5)
    assert layer.momentum == 0.5
