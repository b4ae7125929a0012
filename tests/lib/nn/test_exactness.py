"""Layers that depend on the split of a batch are found by trying, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.nn.activation_checkpointing import configure_recomputation
from lib.nn.batch_norm import configure_norm
from lib.nn.dropout import dropouts, key_stock_dropouts
from lib.nn.exactness import inexact_modules, recomputes_exactly
from lib.nn.model_code import has_stock_layers


class DropPath(nn.Module):
    """As timm has it: whole samples are dropped."""

    def __init__(self, drop_prob: float, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty(len(x), *(1,) * (x.dim() - 1)).bernoulli_(1 - self.drop_prob)
        return x * kept / (1 - self.drop_prob if self.scale_by_keep else 1)


class Attention(nn.Module):
    """As timm has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attn_drop, self.fused_attn = nn.Linear(6, 18), nn.Dropout(0.3), True

    def forward(self, x_NTC: Tensor) -> Tensor:
        q, k, v = self.qkv(x_NTC).chunk(3, dim=-1)
        if self.fused_attn:
            return F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0
            )
        return self.attn_drop(torch.softmax(q @ k.transpose(-1, -2), -1)) @ v  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.attn, self.path, self.drop = Attention(), DropPath(drop), nn.Dropout(drop)

    def forward(self, x_NTC: Tensor) -> Tensor:
        return x_NTC + self.drop(self.path(self.attn(x_NTC)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, functional: float = 0.0) -> None:
        super().__init__()
        self.functional = functional
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x_NTC: Tensor) -> Tensor:
        x_NTC = self.norm(self.blocks(x_NTC).flatten(0, 1)).view_as(x_NTC)
        return self.head(F.dropout(x_NTC.mean(1), self.functional, self.training))  # type: ignore[no-any-return]


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def inputs() -> Tensor:
    return torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_every_stock_layer_is_named_before_it_is_converted() -> None:
    found = inexact_modules(net(functional=0.5), inputs())
    assert set(found) == {
        *(
            f"blocks.{n}.{name}"
            for n in (0, 1)
            for name in ("attn (Attention)", "path (DropPath)", "drop (Dropout)")
        ),
        "norm (BatchNorm1d)",
        "before head (Linear)",
    }


def test_converted_it_is_exact_but_for_functions() -> None:
    for functional, expected in ((0.0, []), (0.5, ["before head (Linear)"])):
        model = net(functional=functional)
        assert key_stock_dropouts(model) == (6, ["blocks.0.attn", "blocks.1.attn"])
        assert configure_norm(model, norm_batch=2, momentum=None) == 1
        assert inexact_modules(model, inputs()) == expected
        assert len({layer.site for layer in dropouts(model)}) == 6


def test_a_plain_batch_normalisation_alone_is_named() -> None:
    model = net()
    key_stock_dropouts(model)
    assert inexact_modules(model, inputs()) == ["norm (BatchNorm1d)"]


def test_what_is_seldom_dropped_is_found_by_the_random_numbers_that_it_draws() -> None:
    model = nn.Sequential(nn.Linear(6, 6), DropPath(1e-6)).double()
    assert inexact_modules(model, inputs()) == ["1 (DropPath)"]


def test_generators_stay_where_they_were() -> None:
    before = torch.get_rng_state()
    inexact_modules(Net().double(), inputs())
    assert not torch.equal(before, torch.get_rng_state()), "weights are drawn"
    model, before = net(), torch.get_rng_state()
    inexact_modules(model, inputs())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("scales", [True, False])
def test_dropped_paths_are_whole_samples_with_the_rate(scales: bool) -> None:
    from lib.nn.dropout import key_samples

    model = nn.Sequential(DropPath(0.25, scales))
    assert key_stock_dropouts(model) == (1, [])
    key_samples(dropouts(model), seed=1, first=0, count=4000, device=torch.device("cpu"))
    rows = model(torch.ones(4000, 2, 3)).flatten(1)
    assert (rows == rows[:, :1]).all()
    kept = rows[:, 0] != 0
    assert abs(kept.double().mean() - 0.75) < 0.03
    torch.testing.assert_close(rows[kept].unique(), torch.tensor([4 / 3 if scales else 1.0]))
    assert torch.equal(model.eval()(torch.ones(3, 2)), torch.ones(3, 2))


def test_rates_of_zero_and_one_stay_torchs() -> None:
    model = nn.Sequential(nn.Dropout(0), nn.Dropout(1), DropPath(0.0), nn.AlphaDropout(0.5))
    assert key_stock_dropouts(model) == (0, []) and not dropouts(model)


class Counting(nn.Module):
    """Blocks that count their calls, so that their second run is another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.linear(x).tanh() * self.calls  # type: ignore[no-any-return]


def test_blocks_without_a_chain_are_recomputed_where_that_is_exact() -> None:
    model = net()
    key_stock_dropouts(model)
    assert configure_recomputation(model, "blocks")
    assert [type(block).__name__ for block in model.blocks] == ["RecomputedBlock"] * 2
    assert recomputes_exactly(model, inputs())
    counting = nn.Sequential(Counting(), Counting()).double()
    assert configure_recomputation(counting, "blocks")
    assert not recomputes_exactly(counting, inputs())


def test_models_of_the_tree_have_no_stock_layers() -> None:
    assert has_stock_layers(Net()), "they are of this file"
    assert has_stock_layers(nn.Sequential(nn.Dropout(0.1)))
    assert not has_stock_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
