"""Adam with its state in 8 bits: the code, what a step does, what is stored, and resuming to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib.optim import adam_8bit
from lib.optim.adam_8bit import BLOCK, SMALLEST, Adam8bit, code_book
from lib.optim.factory import make_optimizer

OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def steps(rule: torch.optim.Optimizer, own: nn.Parameter, *seeds: int) -> None:
    for seed in seeds:
        own.grad = weight(*own.shape, seed=seed, dtype=own.dtype).detach() * (1 + seed)
        rule.step()


def test_the_code_is_dense_near_zero_and_fills_a_byte() -> None:
    for signed in (True, False):
        book = code_book(signed=signed)
        assert len(book) == 256 and (book.diff() > 0).all() and 0 in book and book[-1] == 1
        assert float(book[book > 0][0]) < 6e-7 and float(book.diff()[-2]) < (0.015 if signed else 0.0075)
    assert torch.equal(-code_book(signed=True)[:127].flip(0), code_book(signed=True)[128:255])


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("shape", [(7, 9), (40, 111), (8, 5, 11, 10)])
def test_it_follows_adam(shape: tuple[int, ...], decoupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights to rounding; others differ in how their means are rounded, also in parts."""
    monkeypatch.setattr(adam_8bit, "_CHUNK", 2 * BLOCK)
    own, other = weight(*shape), weight(*shape)
    if len(shape) == 4:
        own.data = own.data.contiguous(memory_format=torch.channels_last)
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    first = own.detach().clone()
    one, two = Adam8bit([own], **OPTIONS, decoupled=decoupled), theirs([other], **OPTIONS)
    steps(one, own, 1, 2, 3), steps(two, other, 1, 2, 3)
    moved, off = (other - first).detach().norm(), (own - other).detach().norm()
    exact = own.numel() < SMALLEST
    assert off <= (1e-5 if exact else 0.03) * moved and (exact or off > 1e-4 * moved)
    kept = one.state[own]
    assert {each.dtype for n, each in kept.items() if n in ("mean", "root")} == {
        torch.float32 if exact else torch.uint8
    }
    if not exact:
        sizes = sum(each.nbytes for each in kept.values() if isinstance(each, Tensor))
        assert sizes == 2 * own.numel() + 8 * -(-own.numel() // BLOCK)


def test_a_root_is_0_for_no_gradient_alone() -> None:
    """Else what follows a small gradient would be divided by epsilon alone."""
    own = weight(SMALLEST)
    own.grad = torch.zeros(SMALLEST)
    own.grad[:2] = torch.tensor([1.0, 1e-7])  # of the second the mean is rounded to 0 as well
    rule = Adam8bit([own], **OPTIONS)
    rule.step()
    state, part = rule.state[own], slice(0, SMALLEST)
    root, mean = (rule._stored(state, name, part, BLOCK).read().view(-1) for name in ("root", "mean"))
    assert root[1] > 0 and root[0] == pytest.approx(0.1) and not root[2:].any()
    assert mean[0] == pytest.approx(0.1) and not mean[1:].any()


def test_it_is_resumed_to_the_bit_and_its_bytes_stay_bytes() -> None:
    whole = weight(70, 80)
    rule = Adam8bit([whole], **OPTIONS)
    steps(rule, whole, 1, 2)
    again = nn.Parameter(whole.detach().clone())
    resumed = Adam8bit([again], **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(rule.state_dict()))
    assert resumed.state[again]["mean"].dtype == torch.uint8
    steps(rule, whole, 3, 4), steps(resumed, again, 3, 4)
    assert torch.equal(whole, again)
    theirs, own = rule.state[whole], resumed.state[again]
    assert all(torch.equal(*map(torch.as_tensor, (theirs[name], own[name]))) for name in theirs)


def test_a_compiled_update_has_its_numbers_in_the_precision_of_each_weight() -> None:
    """Else those of the first weight would be another's: 0.01 in float32 is not that in float64."""
    pairs = []
    for compiler in (None, lambda function: function):
        own = [weight(7, 9), weight(7, 9, dtype=torch.float64)]
        rule = Adam8bit(own, **OPTIONS, compiler=compiler)
        for each in own:
            each.grad = torch.ones_like(each)
        rule.step()
        pairs.append(own)
    for one, two in zip(*pairs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12 if one.dtype == torch.float64 else 1e-6, atol=0)


def test_the_factory_makes_it_of_both() -> None:
    model = nn.Linear(64, 64)
    options: dict[str, Any] = {"momentum": None, "nesterov": False, "adam_beta1": 0.9, "adam_beta2": 0.99}
    options |= {"learning_rate": 0.1, "weight_decay": 0.2, "adam_eps": 1e-8, "adam_8bit": True}
    for name, decoupled in (("adam", False), ("adamw", True)):
        rule = make_optimizer(model, name=name, **options)  # type: ignore[arg-type]
        assert isinstance(rule, Adam8bit) and rule.defaults["decoupled"] == decoupled
        assert [group["weight_decay"] for group in rule.param_groups] == [0.2, 0.0]
        assert rule.param_groups[0]["peak_lr"] == 0.1
    with pytest.raises(ValueError, match="takes no closure"):
        rule.step(lambda: Tensor())  # type: ignore[arg-type,return-value]
